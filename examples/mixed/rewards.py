"""The reward of the search run: a plain function that runs in serverless processes.

It is a separate module because those processes import it, with everything that it needs.
"""

from __future__ import annotations

import math
import re

import tangram


@tangram.function(cpus=0.25, memory="256MiB", max_instances=2, timeout_s=60)
def share_found(notes: list[str], lengths: dict[str, int], judged: list[float]) -> float:
    """Return the share of places whose length is in the notes; 0 for notes that the judge cannot read."""
    if not judged or not all(map(math.isfinite, judged)):
        return 0.0
    noted = dict(re.findall(r"The (.+) is (\d+) metres long", "\n".join(notes)))
    return sum(noted.get(place) == str(metres) for place, metres in lengths.items()) / len(lengths)
