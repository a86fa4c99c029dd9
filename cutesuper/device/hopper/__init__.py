"""Building blocks that only Hopper (sm_90a) has."""
