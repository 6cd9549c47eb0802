"""`python -m orchestrator` is `geosweep`."""

from orchestrator.cli import main

if __name__ == "__main__":
    main()
