"""Sweep files that ship with the package; `geosweep run demo` finds them here by name."""
