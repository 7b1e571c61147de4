"""What is done with a run, the directory that training leaves: evaluate it, recommend from it, report on it.

`Run` opens the directory; each other module holds the function behind one command. Everything here stands above training.
"""

from jagged.runs.run import Run as Run

__all__ = ["Run"]
