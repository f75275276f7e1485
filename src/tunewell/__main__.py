"""Run the command line with `python -m tunewell`."""

from tunewell.cli.main import run

if __name__ == "__main__":
    run()
