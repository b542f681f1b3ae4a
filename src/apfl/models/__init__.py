"""What a client ends up with: the models, and the one file format they are kept in."""
