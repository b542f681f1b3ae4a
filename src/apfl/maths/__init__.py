"""The maths of the paper: tensors in, tensors out."""
