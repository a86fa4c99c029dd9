"""Building blocks that only Blackwell (sm_100a, sm_103a) has."""
