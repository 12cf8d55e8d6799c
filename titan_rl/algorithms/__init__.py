"""A named algorithm is a composition: advantage x ratio x surrogate x correction x aggregation x KL."""
