"""What every picture shares."""

import pytest

from fedweave.report.style import Picture, canvas, legend


@pytest.mark.parametrize(
    "names", [["a", "b"], [f"fedweave, alpha = 0.{i}, {'a setting, ' * 9}" for i in range(12)]]
)
@pytest.mark.filterwarnings("error::UserWarning")  # matplotlib warns where no room is left for a plot
def test_a_legend_leaves_the_plot_its_room(names):
    figure, ax = canvas()
    for name in names:
        ax.plot([0, 1], label=name)
    legend(ax)
    text = Picture("p", "t", "c", figure).svg()
    assert all(name.split(",")[0] in text for name in names)
    box = ax.get_position()
    width, height = figure.get_size_inches()
    assert box.width * width > 3.5 and box.height * height > 2


def test_wide_letters_have_room_and_tables_stay_aligned():
    from fedweave.console import columns_of, table
    from fedweave.report.style import canvas, named_rows

    assert columns_of("天气") == 4 and columns_of("cafe\u0301") == 4 and columns_of("abc") == 3
    rows = table(["kind", "score"], [["天气", "1"], ["weather", "2"]]).splitlines()
    assert {columns_of(line) for line in (rows[2], rows[3])} == {columns_of(rows[3])}
    _, ax = canvas()
    long = ["Krankenhaus am Bodensee, Haus 2", "Krankenhaus am Bodensee, Haus 3"]
    named_rows(ax, ["北京医院", "north", *long], "loss")
    short = ["Krankenhaus …, Haus 2", "Krankenhaus …, Haus 3"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["    北京医院", "north", *short]


def test_a_picture_says_what_the_pointer_rests_on():
    import numpy as np

    from fedweave.report.style import Picture, canvas, shaded_table

    figure, ax = canvas()
    shaded_table(ax, np.array([[0.25, 1.0]]), ["<north>"], ["E0", "E1"], "{:.0%}")
    drawn = Picture("x", "X", "", figure).svg()
    assert (
        "<title>&lt;north&gt;, E1: 100%</title>" in drawn and "var(--heat)" in drawn and "var(--on-heat)" in drawn
    )


def test_a_picture_says_whose_its_parts_are():
    from fedweave.report.style import tip

    figure, ax = canvas()
    ax.plot([0, 1], gid=tip("a <b>", 'north "1" = x', 3))
    ax.plot([1, 0], gid=tip("", expert=0))
    drawn = Picture("x", "X", "", figure).svg()
    assert 'data-client="north &quot;1&quot; = x" data-expert="3"><title>a &lt;b&gt;</title>' in drawn
    unsaid = drawn.split('<g class="tip" data-expert="0">')[1]
    assert "<title>" not in unsaid and "data-client" not in unsaid


@pytest.mark.parametrize(
    "name", [r"$\frac$", "5$ or 6$", "\u2063", "\u2063x onmouseover=alert(1)", "\u2063client=b"]
)
def test_a_name_is_no_formula_and_no_attribute(name, tmp_path):
    from fedweave.report.style import named_rows, tip

    figure, ax = canvas()
    ax.plot([1, 2], [0, 1], label=name, gid=tip(f"{name}: 3", client=name))
    named_rows(ax, [name, "b"], "loss")
    legend(ax)
    picture = Picture("p", "t", "c", figure)
    drawn, plain = picture.svg(), name.replace("\u2063", "")
    assert f'<g class="tip" data-client="{plain}"><title>{plain}: 3</title>' in drawn
    assert drawn.count(f">{name}</text>") == 2  # beside its row and in the legend
    picture.save(tmp_path)
