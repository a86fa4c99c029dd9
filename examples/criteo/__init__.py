"""DLRM and clicks to train it on, which have the form of the Criteo data and are made here."""
