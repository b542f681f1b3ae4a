"""From a dataset or a plan to records."""
