"""Linear cross-entropy on Hopper, in Gluon: kernels whose warps specialise."""
