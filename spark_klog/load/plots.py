"""Records by hour as a picture, or as bars in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from spark_klog.errors import ConfigError

_BAR = 40


def bars(hours: dict[str, dict[str, int]]) -> Iterator[str]:
    """A line for each hour of each topic; the longest bar is the topic's largest hour."""
    for topic, each in hours.items():
        yield topic
        most = max(each.values(), default=1)
        for hour in _every_hour(sorted(each)) if each else ():
            count = each.get(hour.strftime("%Y-%m-%dT%H"), 0)
            yield f"  {hour:%Y-%m-%dT%H}  {'#' * -(-count * _BAR // most):<{_BAR}}  {count:,}"


def plot_hours(hours: dict[str, dict[str, int]], path: Path) -> None:
    """Draw the records of each topic by hour as a PNG; `ConfigError` without matplotlib or without records."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'spark-klog[demo]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not hours:
        raise ConfigError("there is nothing to plot: the load has no records")
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    for topic, each in hours.items():
        times = _every_hour(sorted(each))
        axes.step(times, [each.get(time.strftime("%Y-%m-%dT%H"), 0) for time in times], where="post", label=topic)
    axes.set_ylabel("records an hour")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.autofmt_xdate()
    figure.savefig(path, format="png")
    pyplot.close(figure)


_MOST_HOURS = 24 * 366


def _every_hour(names: Sequence[str]) -> list[datetime]:
    """The hours from the first to the last, also those without records, unless there are too many to draw."""
    found = [datetime.strptime(name, "%Y-%m-%dT%H").replace(tzinfo=timezone.utc) for name in names]
    count = int((found[-1] - found[0]).total_seconds()) // 3600 + 1
    if count > _MOST_HOURS:
        return found
    return [datetime.fromtimestamp(found[0].timestamp() + 3600 * index, timezone.utc) for index in range(count)]
