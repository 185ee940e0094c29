"""The soak's picture: one small chart for each resource, over the runs."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from rollyard_loadtest.growth import Growth, Sample, measured

_COLUMNS = 5


def plot(growths: list[Growth], samples: list[Sample], path: Path) -> None:
    """Write the charts; grey is the warm-up that the fit leaves out, red what grows."""
    rows = -(-len(growths) // _COLUMNS)
    figure, grid = pyplot.subplots(rows, _COLUMNS, figsize=(4 * _COLUMNS, 2.4 * rows))
    charts = list(grid.flat)
    warm_until = measured(samples)[0].runs
    for chart, g in zip(charts, growths, strict=False):
        scale = g.resource.scale
        runs = [sample.runs for sample in samples]
        values = [sample.values[g.resource.name] / scale for sample in samples]
        chart.plot(runs, values, color="C0" if g.flat else "C3", linewidth=1)
        chart.axvspan(0, warm_until, color="0.92")
        # Never zoom into less than the noise: flat must look flat.
        room = max(g.resource.noise or 0.0, 0.05 * max(values), max(values) - min(values)) * 1.1
        middle = (max(values) + min(values)) / 2
        chart.set_ylim(max(0.0, middle - room), middle + room)
        unit = f" ({g.resource.unit})" if g.resource.unit else ""
        chart.set_title(f"{g.resource.name}{unit}: {g.per_10k:+.2f} per 10,000 runs", fontsize=8)
        chart.tick_params(labelsize=7)
    for chart in charts[len(growths) :]:
        chart.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=80)  # pyright: ignore[reportUnknownMemberType]
    pyplot.close(figure)
