"""What every room stands on: hardware, reports, costs, numerics, and the two compilers."""
