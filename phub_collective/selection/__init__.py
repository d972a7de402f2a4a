"""Which backend does an operation: the user's `rules`, the `probe` of this machine, the
`costmodel` through its points, and the `selector` that puts them together."""
