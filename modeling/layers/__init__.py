"""Building blocks shared by the models, one idea a file."""
