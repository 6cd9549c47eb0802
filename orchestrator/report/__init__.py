"""One page, and single figures, that show what a sweep found."""
