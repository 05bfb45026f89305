"""nearlight: what keeps a PyTorch program from the speed of light of its GPU, and the fixes."""

__version__ = "0.1.0"
