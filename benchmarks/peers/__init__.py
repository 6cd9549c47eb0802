"""What a user would take instead, written as a competent user would, for the benchmarks beside this folder."""
