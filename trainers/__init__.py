"""One training run: recipe in, checkpoints and curve out. Works without Ray, a sweep or a store."""
