"""What a run writes for others to read: rows of metrics.jsonl, and result.json. At run time they are plain dicts.

The string under each field is its meaning, from which `make docs` writes docs/records.md. A change that old readers
would misread gets a new version, a line in its history, and a step in `read_row` or `read_result` that opens files of
the version before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NotRequired, Required, TypedDict, cast

from fednorm.errors import CheckpointError
from fednorm.files import finite, infinite_again, safe_name

ROW_VERSION = 1
ROW_HISTORY = {
    0: "rows without `version`, written before there were versions; read as version 1",
    1: "`version` in every row; `seconds` may be absent; since then also `time` and `staleness`, on a clock alone",
}
RESULT_VERSION = 1
RESULT_HISTORY = {
    0: "files without `version`; read as version 1",
    1: "`version`, `runs` and `table`; since then also `made_from`, `sha256`, and on a clock `time` and what it names",
}


class RunId(NamedTuple):
    """Which run of a comparison a row belongs to."""

    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.method} seed {self.seed}"

    @property
    def file_name(self) -> str:
        """The run's folder inside a comparison, and what belongs to it elsewhere."""
        return f"{safe_name(self.method)}-seed{self.seed}"


class ProtocolScores(TypedDict, total=False):
    """Scores of one protocol. Which fields there are depends on the task, and on whether one model was tested or one
    for each client. A task of one's own has its metrics by their names, beside `loss`."""

    accuracy: float
    """percent of examples that were classified rightly; with several clients or domains their unweighted mean"""
    miou: float
    """segmentation: mean over classes of intersection over union, in percent"""
    pixel_accuracy: float
    """segmentation: percent of pixels that were classified rightly"""
    f1: float
    """several labels: mean over labels of F1, in percent"""
    f1_micro: float
    """several labels: F1 of all labels taken as one, in percent"""
    exact_match: float
    """several labels: percent of examples whose labels were all right"""
    rmse: float
    """regression: root mean squared error over all targets, in their unit"""
    mae: float
    """regression: mean absolute error"""
    r2: float | None
    """regression: share of the targets' variance that is explained; null where a target does not vary"""
    loss: float | None
    """mean loss, by class weights where the task has some; with several clients their unweighted mean"""
    per_class: list[float | None]
    """the metric of each class or label, where one model was tested; null for a class without examples"""
    per_target: list[float]
    """regression of several targets: the metric of each, where one model was tested"""
    worst: float
    """the metric of the client that fares worst"""
    per_client: dict[int, float]
    """the metric of each client, by client id (text in a file, as JSON has it)"""
    per_client_metrics: dict[str, dict[int, float | None]]
    """every other number of each client, by its name and client id: `loss`, and the task's further metrics"""
    per_domain: dict[str, float]
    """the metric of each domain, by its name"""
    how: str
    """`pooled`: what was tested, "global model", "averaged local state", "averaged local state of the last cohort" (see
    eval.average) or "mean over the clients' own models"; `unseen`: where a newcomer's statistics come from"""
    sample: str
    """present where only some clients were scored: how many of how many"""


class Scores(TypedDict, total=False):
    """Scores by protocol: which model was tested on which data. A protocol that does not apply is absent."""

    pooled: ProtocolScores
    """the global model on the whole test set"""
    domains: ProtocolScores
    """the global model on each domain's test set, unweighted mean"""
    own_client: ProtocolScores
    """each client's model on the test rows that look like its own data, unweighted mean"""
    unseen: ProtocolScores
    """the model a newcomer would use, on the own test rows of clients that never train"""
    validation: ProtocolScores
    """each client's model on the training rows it set aside; only this may choose a round"""


class MetricFacts(TypedDict):
    """What the headline number is."""

    name: str
    """its name in the scores"""
    higher_is_better: bool
    """whether more of it is better"""
    percent: bool
    """whether it is between 0 and 100; otherwise it has the targets' unit"""


class RoundRow(TypedDict):
    """One round: a line of metrics.jsonl, and what `on_row` is told."""

    version: int
    """version of the row"""
    round: int
    """number of the round, or on a clock of the version of the server's model, from 1"""
    stage: int
    """stage of the method in this round, from 0; most methods have one"""
    clients: int
    """clients that were asked to train"""
    exchanges: int
    """times that clients and server sent something to each other"""
    bytes_up: int
    """bytes that clients sent, all together"""
    bytes_down: int
    """bytes that clients were sent, all together"""
    lr: float
    """learning rate of the clients' last phase"""
    train_loss: float
    """mean training loss of the clients' last phase, each client counted once"""
    train_loss_weighted: NotRequired[float]
    """the same with clients weighted by how many examples they train on; absent in rows of earlier versions"""
    cohort: NotRequired[list[int]]
    """ids of the clients of the round; absent where all take part; on a clock, one may be there twice"""
    eval: NotRequired[Scores]
    """scores; absent in rounds that were not scored (see eval.every)"""
    metric: NotRequired[MetricFacts]
    """what the headline number of the scores is; absent where there are none"""
    dropped: NotRequired[list[int]]
    """ids of clients that were drawn and gone (world.dropout); absent where none was"""
    straggled: NotRequired[dict[int, int]]
    """steps that slow clients did, by client id (text in a file), where fewer than usual; absent where none was slow"""
    refused: NotRequired[dict[int, str]]
    """clients that the round went on without, and why: their update was refused, their training failed, or they did not
    answer; by client id (text in a file); absent where there are none"""
    retried: NotRequired[int]
    """how often clients were asked again because too few could be used; absent where that was not so"""
    probes: NotRequired[dict[str, dict[int, dict[str, float]]]]
    """what probes saw of each client's work, by phase, client id (text in a file) and probe"""
    round_probes: NotRequired[dict[str, dict[str, float]]]
    """what probes saw of the merge, by phase and probe; absent where none looks at merges"""
    time: NotRequired[float]
    """on a clock: virtual time at which this version was made"""
    staleness: NotRequired[list[int]]
    """on a clock: of each update in it, by `cohort`, how many versions were made while it was on its way"""
    seconds: NotRequired[float]
    """seconds the round took; absent where a run was stopped before they were measured"""
    not_finite: NotRequired[dict[str, str]]
    """numbers that were not finite: "nan", "inf" or "-inf" by their place, as in "/eval/pooled/loss", where the file
    has null; absent where all were finite"""


class BestRound(Scores, total=False):
    """All scores of the round that was best on the validation data: the fields of Scores, and one more."""

    round: Required[int]
    """number of the round"""


class Peak(TypedDict, total=False):
    """The best score of a protocol on test data: for curves and tables of papers, not for choosing a round."""

    round: Required[int]
    """number of the round, the first where several are equal"""
    accuracy: float
    """the score, where the metric is accuracy"""
    miou: float
    """the score, where the metric is miou; other metrics likewise, by their names"""


class Curves(TypedDict, total=False):
    """The metric by round: lists of one length. A protocol that does not apply is absent."""

    round: Required[list[int]]
    """numbers of the rounds that were scored"""
    time: list[float]
    """on a clock: the virtual time of each of them"""
    pooled: list[float]
    """the metric of this protocol in each of them"""
    domains: list[float]
    """likewise"""
    own_client: list[float]
    """likewise"""
    unseen: list[float]
    """likewise"""
    validation: list[float]
    """likewise"""


class Bytes(TypedDict):
    """What went over the wire."""

    up: int
    """bytes that clients sent in the whole run"""
    down: int
    """bytes that clients were sent in the whole run"""
    per_round: int
    """bytes of the last round, both directions"""


class Ran(TypedDict):
    """What really played a run, whatever was asked for."""

    engine: str
    """engine that trained the clients: `sequential`, `stacked` or `workers`"""
    fell_back: str | None
    """why it is not the engine that was chosen, by name; null where it is"""
    precision: str
    """numbers inside a GPU's convolutions and norms: `fp32`, `tf32` or `bf16`"""
    threads: int
    """CPU threads of each process that trained"""
    processes: int
    """processes that trained: worker processes, ranks, or one"""
    device: str
    """device that trained: `cpu`, `cuda:0`, `mps`"""
    device_name: str
    """what its maker calls it"""
    before: NotRequired[list[Ran]]
    """what played earlier rounds, where a run went on elsewhere; the first comes first"""


class RunResult(TypedDict):
    """What came out of one run, computed from its rows."""

    method: str
    """method expression"""
    seed: int
    """seed of everything random"""
    rounds: int
    """rounds that were asked for"""
    rounds_done: int
    """rounds that were played"""
    metric: str
    """name of the headline number in the scores: `accuracy`, `miou`, `f1`, `rmse`, or a task's own"""
    higher_is_better: NotRequired[bool]
    """whether more of it is better; true in files that do not say"""
    percent: NotRequired[bool]
    """whether it is between 0 and 100, otherwise it has the targets' unit; true in files that do not say"""
    final: Scores
    """scores after the last round"""
    best_validation: BestRound | None
    """scores of the round that was best on the validation data; null without such data"""
    peak: dict[str, Peak]
    """the best score of each protocol on test data"""
    curves: Curves
    """scores by round"""
    bytes: Bytes
    """what went over the wire"""
    refused: int
    """updates that were refused"""
    time: NotRequired[float]
    """on a clock: virtual time of the whole run"""
    staleness: NotRequired[dict[str, int]]
    """on a clock: how many updates were how stale"""
    seconds: float
    """seconds of all rounds whose time was measured"""
    notes: list[str]
    """what a user should know about how the model was prepared"""
    digest: str
    """digest of the server's final state: equal digests, equal bits"""
    client_names: NotRequired[list[str]]
    """names of the clients, in the order of their ids; absent where they have none"""
    ran: NotRequired[Ran]
    """engine, precision, threads and device; absent in results of older versions"""
    not_finite: NotRequired[dict[str, str]]
    """numbers that were not finite, as in a row: where the file has null"""


class MeanOverSeeds(TypedDict):
    """A score of a method over its seeds."""

    mean: float
    """mean"""
    std: float
    """sample standard deviation; 0 with one seed"""
    n: int
    """seeds"""


class TableLine(TypedDict):
    """One method in the table of a result: its final scores over all seeds."""

    method: str
    """method expression"""
    seeds: list[int]
    """seeds it was run with"""
    pooled: NotRequired[MeanOverSeeds]
    """final score of this protocol; absent where it does not apply"""
    domains: NotRequired[MeanOverSeeds]
    """likewise"""
    own_client: NotRequired[MeanOverSeeds]
    """likewise"""
    unseen: NotRequired[MeanOverSeeds]
    """likewise"""
    how: str
    """what was tested as `pooled`"""
    time: NotRequired[MeanOverSeeds]
    """on a clock: virtual time of the whole run"""
    time_to: NotRequired[dict[str, MeanOverSeeds]]
    """on a clock: virtual time until the pooled score was first at 10, 20, ... percent, as far as all seeds came"""
    bytes_per_round: int
    """bytes of a round, both directions"""
    seconds: float
    """seconds of all its runs"""


class MadeFrom(TypedDict):
    """What a result was computed from; one that is of something else is refused."""

    config: str
    """digest of config.json"""
    state: NotRequired[str]
    """digest of all that state.sqlite held; absent in a comparison, whose runs have theirs"""


class ResultFile(TypedDict):
    """result.json of a run (one entry in `runs`) or of a comparison; `--json` prints it with `folder` added."""

    version: int
    """version of the file"""
    runs: list[RunResult]
    """every run, seed by seed and within a seed method by method"""
    table: list[TableLine]
    """one line a method"""
    made_from: NotRequired[MadeFrom]
    """what it was computed from; only in files"""
    sha256: NotRequired[str]
    """digest of all else in the file; only there"""


OnRow = Callable[[RunId, RoundRow], None]
"""Told after every round of every run: which run, and its row."""


def as_written(record: Mapping[str, Any]) -> dict[str, Any]:
    """A row or a run's result as a file has it: null for numbers that are not finite, which `not_finite` names."""
    clean, words = finite(record)
    return {**clean, "not_finite": words} if words else clean


def as_it_was(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What `as_written` wrote, with its numbers; the words go, since they are written anew."""
    record = {key: value for key, value in stored.items() if key != "not_finite"}
    return infinite_again(record, stored.get("not_finite", {}))


def read_row(stored: Mapping[str, Any], where: str = "a row of metrics.jsonl") -> RoundRow:
    """A row that was stored, as this version has it; `where` it comes from is for an error."""
    _check_version(stored, ROW_VERSION, where)
    return cast(RoundRow, {"version": ROW_VERSION, **as_it_was(stored)})


def read_result(stored: Mapping[str, Any], where: str = "result.json") -> ResultFile:
    """A result that was stored, as this version has it; `where` it comes from is for an error."""
    _check_version(stored, RESULT_VERSION, where)
    if not isinstance(stored.get("runs"), list) or not stored["runs"]:
        raise CheckpointError(f"{where} holds no run; delete it and resume, and it is written anew")
    runs = [as_it_was(run) for run in stored["runs"]]
    return cast(ResultFile, {"version": RESULT_VERSION, **stored, "runs": runs})


def _check_version(stored: Mapping[str, Any], newest: int, where: str) -> None:
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"{where} is not a record of a run; give a folder that fednorm made")
    version = stored.get("version", newest)  # files from before there were versions differ in nothing else
    if version not in range(1, newest + 1):
        raise CheckpointError(
            f"{where} has version {version}, this fednorm reads {newest}; use the fednorm that wrote it, or a newer one"
        )


def score_of(scores: Scores, protocol: str, metric: str) -> float:
    """One number of some scores, by names that are known only at run time."""
    return cast("Mapping[str, Mapping[str, float]]", scores)[protocol][metric]


def number_text(value: float, percent: bool) -> str:
    """A headline number for people: percents with one digit after the point, others with four that count.

    >>> number_text(71.25, True), number_text(0.012345, False), number_text(12345.6, False)
    ('71.2', '0.01235', '1.235e+04')
    """
    return f"{value:.1f}" if percent else f"{value:.4g}"
