"""What is done with a run on a table's requests: train it, score rows, recommend, evaluate, report."""

from jagged.runs.ranking.run import RankingRun as RankingRun

__all__ = ["RankingRun"]
