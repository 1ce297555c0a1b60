"""What every picture shares."""

import pytest

from fedweave.report.style import Picture, canvas, legend


@pytest.mark.parametrize(
    "names", [["a", "b"], [f"fedweave, alpha = 0.{i}, {'a setting, ' * 9}" for i in range(12)]]
)
@pytest.mark.filterwarnings("error")  # matplotlib warns where no room is left for a plot
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
