"""Tables as data: columns by what they hold, statistics worked out by hand, and every refusal by its exact words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fednorm.data.federation import Federation
from fednorm.data.from_files.deal import deal
from fednorm.data.from_files.file_set import FileOptions, FileSet
from fednorm.data.from_files.problems import DataError
from fednorm.data.from_files.read import read
from fednorm.data.from_files.source import find_source
from fednorm.errors import ConfigError
from own_files import CLIENTS, HEADER, save_table, table_rows


def table(path: Path, **options: Any) -> FileSet:
    source = find_source(f"table:{path}")
    assert source is not None
    return read(source, FileOptions(**options))


def people(path: Path, **options: Any) -> FileSet:
    return table(path, **{"target": "sick", "client": "site", **options})


def dealt(files: FileSet, **options: Any) -> Federation:
    return deal(files, **{"partition": "own", "options": {}, "num_clients": 3, "seed": 0, **options})


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def split_rows(path: Path) -> Path:
    """Two clients with numbers that can be worked out by hand, and one row each for tests."""
    lines = ["a,kind,who,part,y", "1,p,u,train,no", "3,q,u,train,yes", "5,r,u,test,no"]
    return written(path, *lines, "5,p,v,train,yes", "7,q,v,train,no", "9,q,v,test,yes")


def split_table(path: Path, **options: Any) -> FileSet:
    return table(split_rows(path), target="y", client="who", split="part", **options)


def test_columns_become_classes_clients_and_inputs(tmp_path: Path) -> None:
    data = dealt(people(save_table(tmp_path / "a.csv", table_rows())))
    assert (data.client_names, data.classes, data.task) == (CLIENTS, ("no", "yes"), "classification")
    assert [(len(rows), len(own)) for rows, own in zip(data.clients, data.own_test, strict=True)] == [(16, 4)] * 3
    assert (data.x.shape, data.x.dtype) == ((48, 3), torch.float32)
    assert data.x[:, 0].mean().item() == pytest.approx(0, abs=1e-6)
    assert data.x[:, 0].std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert set(data.x[:, 1:].unique().tolist()) == {0.0, 1.0}


def test_pooled_statistics_are_those_of_all_training_rows(tmp_path: Path) -> None:
    data = dealt(split_table(tmp_path / "a.csv"))
    # 1, 3, 5, 7: mean 4, deviation sqrt(5); r is seen in the test alone, so its columns are all 0
    root = 5**0.5
    assert data.x.tolist() == [
        [pytest.approx(-3 / root), 1, 0],
        [pytest.approx(-1 / root), 0, 1],
        [pytest.approx(1 / root), 1, 0],
        [pytest.approx(3 / root), 0, 1],
    ]
    assert data.test_x.tolist() == [[pytest.approx(1 / root), 0, 0], [pytest.approx(5 / root), 0, 1]]
    assert data.notes == (
        "target y: classification, 2 classes (no, yes)",
        "3 inputs; columns by kind: number 1, category 1",
        "numbers standardised over the 4 training rows of all clients that train, which pools means and deviations "
        "over clients: a 4 ± 2.236",
        "categories as columns of 0 and 1, all 0 for one not seen in training: kind (2)",
    )
    assert data.preprocessing == {
        "kind": "table",
        "standardize": "pooled",
        "columns": [
            {"name": "a", "kind": "number", "mean": 4.0, "std": pytest.approx(root)},
            {"name": "kind", "kind": "category", "values": ["p", "q"]},
        ],
    }


def test_each_client_may_standardise_by_itself_or_not_at_all(tmp_path: Path) -> None:
    own = dealt(split_table(tmp_path / "a.csv", standardize="client"))
    assert own.x[:, 0].tolist() == [-1, 1, -1, 1]
    assert own.test_x[:, 0].tolist() == [3, 3]
    assert own.notes[2] == (
        "numbers standardised by each client's own training rows: no mean or deviation leaves a client"
    )
    plain = dealt(split_table(tmp_path / "a.csv", standardize="none"))
    assert plain.x[:, 0].tolist() == [1, 3, 5, 7]


def test_a_clients_own_deviation_by_hand(tmp_path: Path) -> None:
    """Client u has 2 and 8, mean 5 and deviation 3; client v has 7 twice, which keeps its scale, and a gap."""
    rows = ["who,part,a,y", "u,train,2,0", "u,train,8,1", "v,train,7,0", "v,train,7,1", "v,train,NA,1", "u,test,14,0"]
    path = written(tmp_path / "a.csv", *rows, "v,test,9,1")
    files = table(path, target="y", client="who", split="part", standardize="client", missing="mean")
    data = dealt(files, num_clients=2)
    assert data.x[:, 0].tolist() == pytest.approx([-1, 1, 0, 0, 0])
    assert data.test_x[:, 0].tolist() == pytest.approx([3, 2])


def test_clients_that_never_train_add_nothing_to_the_statistics(tmp_path: Path) -> None:
    data = dealt(split_table(tmp_path / "a.csv"), unseen=1)
    assert data.x[:, 0].tolist() == [-1, 1, 3, 5]


def test_missing_numbers_may_become_the_mean(tmp_path: Path) -> None:
    lines = ["a,b,y", "1,1,0", "NA,2,1", "3,,0", "5,3,1", "3,4,0"]
    path = written(tmp_path / "a.csv", *lines)
    with pytest.raises(DataError) as refused:
        table(path, target="y")
    assert refused.value.problems == (
        f"'{path}', line 3: column 'a' has no number; fill it in, or take the mean with --set data.missing=mean",
        f"'{path}', line 4: column 'b' has no number; fill it in, or take the mean with --set data.missing=mean",
    )
    files = table(path, target="y", missing="mean", standardize="none")
    data = dealt(files, partition="iid", num_clients=1, test_fraction=0.2)
    seen = [row[0] for row in data.x.tolist()]
    known = sorted(set(seen) & {1.0, 3.0, 5.0})
    assert all(np.isfinite(seen))
    assert len(known) >= 2


@pytest.mark.parametrize(
    ("cells", "options", "task", "classes"),
    [
        (["0", "1", "1", "0", "2"], {}, "classification", ("0", "1", "2")),
        (["10", "9", "9", "10", "9"], {}, "classification", ("9", "10")),
        (["b", "a", "b", "a", "b"], {}, "classification", ("a", "b")),
        (["0.5", "1", "2", "3", "4"], {}, "regression", ()),
        (["0", "1", "2", "3", "4"], {"task": "regression"}, "regression", ()),
        (["0.0", "1.0", "0.0", "1.0", "0.0"], {"task": "classification"}, "classification", ("0", "1")),
    ],
)
def test_the_task_follows_from_the_target(
    cells: list[str], options: dict[str, Any], task: str, classes: tuple[str, ...], tmp_path: Path
) -> None:
    path = written(tmp_path / "a.csv", "x,y", *(f"{i},{cell}" for i, cell in enumerate(cells)))
    files = table(path, target="y", **options)
    assert (files.task, files.classes) == (task, classes)


def test_several_targets_are_labels_or_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "x,y,z", "1,0,1", "2,1,1", "3,1,0")
    labels = table(path, target="y,z")
    assert (labels.task, labels.num_classes, labels.y.tolist()) == ("multilabel", 2, [[0, 1], [1, 1], [1, 0]])
    numbers = table(path, target="y,z", task="regression")
    assert (numbers.task, numbers.y.shape) == ("regression", (3, 2))


def test_targets_of_a_regression_have_mean_0_and_deviation_1(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "x,y,s", "1,10.0,train", "2,20.0,train", "3,30.0,test")
    data = dealt(table(path, target="y", split="s"), partition="iid", num_clients=1)
    assert (data.y.tolist(), data.test_y.tolist()) == ([-1, 1], [3])
    assert data.notes[-1] == "the target is standardised too, mean 15 and deviation 5: errors are in such deviations"
    plain = table(path, target="y", split="s", standardize="none")
    assert dealt(plain, partition="iid", num_clients=1).y.tolist() == [10, 20]


def test_codes_may_be_categories_and_columns_may_be_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "zip;id;a;y", "7;1;1.5;0", "8;2;2.5;1", "7;3;3.5;0", "8;4;4.5;1", "7;5;5.5;0")
    files = table(path, target="y", features=("zip", "a"), categories=("zip",), standardize="none")
    data = dealt(files, partition="iid", num_clients=1)
    assert data.x[:, :2].sum(1).tolist() == [1.0] * 4
    assert {row[0] for row in data.x.tolist() if row[2] in (1.5, 3.5, 5.5)} == {1.0}


def test_a_partition_deals_rows_that_have_no_client(tmp_path: Path) -> None:
    path = save_table(tmp_path / "a.csv", table_rows())
    files = table(path, target="sick")
    data = dealt(files, partition="dir_client", options={"alpha": 1.0}, num_clients=4)
    assert [len(rows) for rows in data.clients] == [12] * 4
    assert data.client_names == ()
    with pytest.raises(ConfigError) as refused:
        dealt(table(path, target="age"), partition="shards")
    assert str(refused.value) == (
        "partition 'shards' divides by class, but the task is regression; use --partition iid"
    )
    with pytest.raises(ConfigError) as refused:
        dealt(files)
    assert str(refused.value) == (
        "partition 'own' needs data that name their clients; give --client-column COL, or another partition"
    )


@pytest.mark.parametrize(
    ("lines", "options", "problem"),
    [
        ([], {}, "has no rows; give a table with a line of names and rows below it"),
        (["a,y"], {}, "has no rows; give a table with a line of names and rows below it"),
        (["a,y", "1,0", "2"], {}, ", line 3: 1 cells, but the first line has 2 names"),
        (["a,a,y", "1,1,0", "2,2,1"], {}, "has two columns 'a'; rename one"),
        (["a,,y", "1,1,0", "2,2,1"], {}, ": column 2 has no name; give it one in the first line"),
        (
            ["a,y", "1,0", "2,"],
            {},
            ", line 3: the target 'y' is missing; fill it in or remove the row",
        ),
        (
            ["a,y", "1,0", "2,0"],
            {},
            ": target 'y' has one value only, '0'; give data with two classes or more",
        ),
        (["a,y", "1,0", "inf,1"], {}, ", line 3: column 'a' is not finite"),
        (["y", "1", "0"], {}, "has no columns beside y; add some to learn from"),
        (
            ["a,c,y", "1,k,0", "2,,1"],
            {"client": "c"},
            ", line 3: column 'c' names no client; fill it in",
        ),
        (
            ["a,s,y", "1,train,0", "2,val,1"],
            {"split": "s"},
            ": split column 's', line 3: 'val' is neither train nor test",
        ),
        (
            ["a,b,y", "1,u,0", "2,v,1"],
            {"target": "y,b"},
            ": target 'y, b': column 'b' has texts; several targets, and quantities, must be numbers",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(
    lines: Sequence[str], options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.csv", *lines)
    with pytest.raises(ConfigError) as refused:
        table(path, **{"target": "y", **options})
    assert str(refused.value) == f"'{path}'{'' if problem[0] in ',:' else ' '}{problem}"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"target": None},
            "a table needs --target COL; the columns of '{0}': age, city, site, sick",
        ),
        ({"target": "sik"}, "data.target: column 'sik' is not known; did you mean 'sick'?"),
        ({"client": "sites"}, "data.client: column 'sites' is not known; did you mean 'site'?"),
        ({"split": "zzz"}, "data.split: column 'zzz' is not known; known: age, city, sick, site."),
        ({"features": ("agee",)}, "data.features: column 'agee' is not known; did you mean 'age'?"),
        (
            {"client": "sick"},
            "column 'sick' is given for data.target and for data.client; it can be one of them",
        ),
    ],
)
def test_columns_that_are_not_there_are_named_with_the_nearest(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = save_table(tmp_path / "a.csv", table_rows())
    with pytest.raises(ConfigError) as refused:
        people(path, **options)
    assert str(refused.value) == problem.replace("{0}", str(path))


def test_text_that_is_no_category_is_refused_with_advice(tmp_path: Path) -> None:
    dates = [f"2024-{1 + i // 28:02d}-{1 + i % 28:02d}" for i in range(60)]
    path = written(tmp_path / "a.csv", "day,name,y", *(f"{day},p{i:02d},{i % 2}" for i, day in enumerate(dates)))
    with pytest.raises(DataError) as refused:
        table(path, target="y")
    assert refused.value.problems == (
        f"'{path}': column 'day' has 60 different texts, such as '2024-01-01', too many for categories; turn it into "
        "numbers, such as days, or leave it out by naming the others in data.features",
        f"'{path}': column 'name' has 60 different texts, such as 'p00', too many for categories; group its values, or "
        "leave it out by naming the others in data.features",
    )


def test_long_texts_are_no_numbers_and_cost_no_more_than_they_are(tmp_path: Path) -> None:
    rows = [(i, "x" * 100_000 if i == 3 else "short", i % 2) for i in range(2_000)]
    data = dealt(table(save_table(tmp_path / "a.csv", rows, ("a", "b", "y")), target="y"), partition="iid")
    assert data.x.shape == (1600, 3)


def test_what_is_no_table(tmp_path: Path) -> None:
    latin = tmp_path / "latin.csv"
    latin.write_bytes("a,y\nköln,1\n".encode("latin-1"))
    problems = {
        latin: "is not UTF-8 text (byte 5); save it as UTF-8",
        tmp_path / "none.csv": "does not exist; give a CSV or Parquet file",
        tmp_path: "is a folder; give a CSV or Parquet file, or folder:DIR for images",
    }
    for path, problem in problems.items():
        with pytest.raises(ConfigError) as refused:
            table(path, target="y")
        assert str(refused.value) == f"'{path}' {problem}"


def test_a_mark_at_the_beginning_and_quoted_cells_are_read_as_spreadsheets_write_them(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffname,"a","y"\n"x, y",1,0\n"x, y",2,1\n\n', encoding="utf-8")
    files = table(path, target="y", standardize="none")
    assert files.y.tolist() == [0, 1]
    assert files.name == f"table:{path}"


def test_parquet_gives_what_csv_gives(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="reading Parquet needs pyarrow")
    arrow = pytest.importorskip("pyarrow")
    rows = table_rows()
    columns = {name: [row[i] for row in rows] for i, name in enumerate(HEADER)}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    one = dealt(people(save_table(tmp_path / "a.csv", rows)))
    other = dealt(people(tmp_path / "a.parquet"))
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.test_y, other.test_y)
    with (tmp_path / "a.parquet").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(ConfigError, match=r"is not a readable Parquet file \(.*\); write it again$"):
        people(tmp_path / "a.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + b"\0" * 20)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        people(path)
    assert str(refused.value) == 'reading a Parquet file needs pyarrow: pip install "fednorm[table]"'


def test_a_row_of_two_clients_has_no_scale_of_its_own(tmp_path: Path) -> None:
    files = table(save_table(tmp_path / "a.csv", table_rows()), target="sick", standardize="client")
    with pytest.raises(ConfigError) as caught:
        dealt(files, partition="dir_client", options={"size": 40})
    text = str(caught.value)
    assert text.startswith("data.standardize=client scales a row by its client's numbers, but row ")
    assert text.endswith(" is dealt more than once; leave out size in data.partition, or give data.standardize=pooled")
