"""The reward of the search run: a plain function, which runs in processes of its own that come and go with the calls.

It stands in a module of its own because those processes import it, and with it all that it needs.
"""

from __future__ import annotations

import math
import re

import tangram


@tangram.function(cpus=0.25, memory="256MiB", max_instances=2, timeout_s=60)
def share_found(notes: list[str], lengths: dict[str, int], judged: list[float]) -> float:
    """The share of the places whose length stands in the notes; nothing for notes that the judge cannot read."""
    if not judged or not all(map(math.isfinite, judged)):
        return 0.0
    found = dict(re.findall(r"The (.+) is (\d+) metres long", "\n".join(notes)))
    return sum(found.get(place) == str(metres) for place, metres in lengths.items()) / len(lengths)
