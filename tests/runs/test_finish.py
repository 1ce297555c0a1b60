"""What follows a run by itself: somebody with a CSV needs `check` and `run own`, and nothing else."""

import csv

import pytest

from fedweave.cli import main
from tests.helpers import read_json


@pytest.fixture
def cases(tmp_path):
    """Two kinds of questions at three places, one kind in German."""
    path = tmp_path / "cases.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["frage", "antwort", "ort"])
        for i in range(60):
            question = f"Wie viele sind {i} und {i}?" if i % 2 else f"Write the plural of word {i}"
            rows.writerow([question, str(2 * i) if i % 2 else f"words {i}", ["nord", "süd", "west"][i % 3]])
    return path


FIELDS = "data.fields=prompt=frage,response=antwort,client=ort"


def test_two_commands_from_a_table_to_a_page(cases, small, tmp_path, says, capsys):
    assert "A run would take this data" in says("check", cases, FIELDS)
    folder = tmp_path / "run"
    tiny = [item for item in small if not item.startswith("data.")]
    assert main(["run", "own", *tiny, f"data.path={cases}", FIELDS, f"output={folder}"]) == 0
    shown = capsys.readouterr().err
    page = (folder / "report.html").read_text(encoding="utf-8")
    answer = read_json(folder / "worth.json")["answer"]
    assert answer.split(":")[0] in " ".join(shown.split()) and answer.split(":")[0] in page
    assert f"{folder / 'report.html'} says what each expert does" in shown and "What each expert is" in page
    assert read_json(folder / "worth" / "fedit" / "summary.json")["config"]["finish"] == []


def test_what_cannot_follow_leaves_the_run_alone(small, tmp_path, capsys):
    options = [*small, "method=local-only", "finish=[worth,report]", f"output={tmp_path / 'run'}"]
    assert main(["run", "quickstart", *options]) == 0
    assert "the run is finished, but not its worth" in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_file_whose_rows_are_all_wrong_is_named_and_not_called_empty(cases, capsys):
    assert main(["check", str(cases)]) == 1
    shown = capsys.readouterr().out
    assert "- cases.csv:2: no 'prompt'" in shown and "60 faults" in shown
