"""Tasks in two processes: the weights, figures and runs of one."""

from __future__ import annotations

from typing import Any

import pytest

from jagged.metrics import WITHHELD
from tests.processes import told_by

EPOCHS = [["epoch", 1, 6], ["epoch", 2, 12], ["epoch", 3, 18]]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = told_by("tests.training.task_processes", tmp_path_factory.mktemp("two"))
    return found


@pytest.mark.parametrize("accumulate", ["1", "3"])
def test_weights_are_those_of_the_joint_batches(result: dict[str, Any], accumulate: str) -> None:
    # A step is 5e-2. The shares of processes are numbers in float32 where nothing is accumulated.
    assert max(result["line"][accumulate]) < 1e-8


def test_a_split_table_with_accumulation(result: dict[str, Any]) -> None:
    assert max(result["split"]) < 1e-8


def test_different_numbers_of_batches_are_refused(result: dict[str, Any]) -> None:
    line = "train: got 3, 2 batches in the 2 processes, expected the same number in each, 1 or more"
    assert result["uneven"] == [line, line]


def test_an_output_that_holds_another_run_is_refused_in_all(result: dict[str, Any]) -> None:
    line = "output: ROOT/sampled is not empty; resume to go on with the run in it, choose another output, or delete it"
    assert result["taken"] == [line, line]


OWN = "expected each one's own share of the rows; give the DataLoader a DistributedSampler, or each process the rows of its rank"


def test_all_rows_in_each_process_are_refused(result: dict[str, Any]) -> None:
    line = f"train: got the same first 6 batches in the processes 0 and 1, {OWN}"
    assert result["all train"] == [line, line]
    whole = "the last checkpoint, ROOT/all valid/checkpoints/step-00000003, is whole: resume"
    line = f"valid: got the same first 4 batches in the processes 0 and 1, {OWN}; {whole}"
    assert result["all valid"] == [line, line]
    assert result["all valid again"] == [6, 6]


def test_shares_of_a_sampler_are_not(result: dict[str, Any]) -> None:
    assert result["sampled"] == result["not compared"] == [6, 6]
    assert result["sampled as before"] is True


def test_figures_are_those_of_all_rows(result: dict[str, Any]) -> None:
    """Also where one process has no batch, and so knows of no task."""
    one, metrics, *ranks = result["merged"]
    for found in ranks:
        for way in ("all", "one has none"):
            assert found[way].keys() == one.keys()
            for group in one:
                assert found[way][group] == pytest.approx(one[group], rel=1e-12)
        assert found["metrics"] == metrics


def test_figures_by_user_request_and_slice_are_those_of_one_process_bit_for_bit(result: dict[str, Any]) -> None:
    """Whatever each process's share, in memory or on disk."""
    _, _, *ranks = result["merged"]
    for found in ranks:
        assert found["ids"] == [result["ids"]] * 3
        assert found["refused"] == [
            "click: got rows with other ids in other processes: none and users; expected the same in each",
            "click: scores are NaN or infinite; train again with a smaller learning_rate",
        ]


def test_drawn_negatives_of_one_process_are_said_by_all(result: dict[str, Any]) -> None:
    one, _, *ranks = result["merged"]
    for found in ranks:
        drawn = found["one has drawn negatives"]
        assert list(drawn) == ["sampled", *(f"sampled_{name}" for name in one if name != "all")]
        for name in drawn:
            plain = one[name.removeprefix("sampled_")] if name != "sampled" else one["all"]
            assert drawn[name] == pytest.approx({key: plain[key] for key in plain if key not in WITHHELD}, rel=1e-12)


def test_a_signal_to_one_process_stops_all_at_the_end_of_a_short_epoch(result: dict[str, Any]) -> None:
    line = "stopped by SIGTERM after step 12; a checkpoint is in ROOT/stopped/checkpoints: resume to go on"
    assert result["interrupted"] == [line, line]


def test_slow_steps_are_stopped_between(result: dict[str, Any]) -> None:
    line = "stopped by SIGTERM after step 8; a checkpoint is in ROOT/slow/checkpoints: resume to go on"
    assert result["slow"] == [line, line]


def test_the_run_goes_on_as_if_nothing_had_been(result: dict[str, Any]) -> None:
    assert result["same"] is True
    assert result["calls"][0] == result["calls"][1]
    assert [call for call in result["calls"][0] if call[0] == "epoch"] == EPOCHS


def test_a_data_loader_goes_on_with_another_number_between_epochs_alone(result: dict[str, Any]) -> None:
    line = (
        "ROOT/slow/checkpoints/step-00000008: was trained by 2 processes, now 1, and stands in epoch 2; what is left of an epoch "
        "is known to loaders of jagged.data, not to a DataLoader or a list; start as many, or choose another output"
    )
    assert result["alone"] == [line, [24, 4]]


def test_a_callback_of_one_process_ends_all(result: dict[str, Any]) -> None:
    assert result["asked"] == [[12, "enough"], [12, "enough"]]


def test_a_weight_that_nothing_uses(result: dict[str, Any]) -> None:
    assert result["idle"] == [18, 18]
