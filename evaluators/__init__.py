"""One checkpoint in, metric values out. Works without Ray, a sweep or a store."""
