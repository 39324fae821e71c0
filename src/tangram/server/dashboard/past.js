// Past: history for charts and tables. Owns the sums over rows of one run, because the view has history and classes only
// over all runs; and the reduction of history to the points that a chart can show. A row without duration is an action
// that ended with an earlier process of the service; its duration is unknown.

const BUCKET_S = 5;
/* As in runtime/views.py. */

/** A quantile of sorted numbers. */
export function quantile(sorted, part) {
  if (!sorted.length) return 0;
  const place = (sorted.length - 1) * part;
  const low = Math.floor(place);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

/** Percentiles of the completion times of a run, or of all with "", among what ended since. */
export function percentilesSince(rows, run, since) {
  const [first] = rows.between(since, Infinity);
  const number = run ? rows.runs.numbers.get(run) : undefined;
  if (run && number === undefined) return {count: 0, p50_s: 0, p95_s: 0, p99_s: 0};
  const times = new Float64Array(rows.length - first);
  let count = 0;
  for (let k = first; k < rows.length; k += 1) {
    const time = rows.ended[k] - rows.submitted[k];
    if (time > 0 && (number === undefined || rows.run[k] === number)) times[count++] = time;
  }
  const sorted = times.subarray(0, count).sort();
  return {count, p50_s: quantile(sorted, 0.5), p95_s: quantile(sorted, 0.95), p99_s: quantile(sorted, 0.99)};
}

/** History of one run, from rows, in the format of the view. */
export function historyOf(rows, run, now) {
  const number = rows.runs.numbers.get(run);
  if (number === undefined) return [];
  const buckets = new Map();
  for (let k = 0; k < rows.length; k += 1) {
    const time = rows.ended[k] - rows.submitted[k];
    if (rows.run[k] !== number || time <= 0) continue;
    const from = Math.floor(rows.ended[k] / BUCKET_S) * BUCKET_S;
    let bucket = buckets.get(from);
    if (!bucket) buckets.set(from, (bucket = {times: [], waiting_s: 0, execution_s: 0, overhead_s: 0}));
    bucket.times.push(time);
    bucket.waiting_s += rows.waiting[k];
    bucket.overhead_s += rows.overhead[k];
    bucket.execution_s += Math.max(0, time - rows.waiting[k] - rows.overhead[k]);
  }
  if (!buckets.size) return [];
  const history = [];
  for (let from = Math.min(...buckets.keys()); from < now; from += BUCKET_S) {
    const bucket = buckets.get(from);
    if (!bucket) {
      history.push({from_s: from, ended: 0, p50_s: 0, p95_s: 0, p99_s: 0, waiting_s: 0, execution_s: 0, overhead_s: 0});
      continue;
    }
    const {times, ...sums} = bucket;
    times.sort((a, b) => a - b);
    const [p50_s, p95_s, p99_s] = [0.5, 0.95, 0.99].map((part) => quantile(times, part));
    history.push({from_s: from, ended: times.length, p50_s, p95_s, p99_s, ...sums});
  }
  return history;
}

/** Classes of one run, from rows, in the format of the view; most time first. */
export function classesOf(rows, run) {
  const number = rows.runs.numbers.get(run);
  if (number === undefined) return [];
  const classes = new Map();
  for (let k = 0; k < rows.length; k += 1) {
    if (rows.run[k] !== number) continue;
    const row = rows.record(k);
    let kind = classes.get(row.name);
    if (!kind) classes.set(row.name, (kind = {name: row.name, times: [], waiting: 0, execution: 0, overhead: 0}));
    kind.times.push(row.ended_s - row.submitted_s);
    kind.waiting += row.waiting_s;
    kind.execution += row.execution_s;
    kind.overhead += row.overhead_s;
  }
  const sum = (times) => times.reduce((a, b) => a + b, 0);
  return [...classes.values()]
    .map((kind) => ({...kind, total: sum(kind.times)}))
    .sort((a, b) => b.total - a.total)
    .map(({name, times, waiting, execution, overhead, total}) => {
      times.sort((a, b) => a - b);
      const n = times.length;
      const [p50_s, p95_s, p99_s] = [0.5, 0.95, 0.99].map((part) => quantile(times, part));
      return {
        name, act: {count: n, mean_s: total / n, p50_s, p95_s, p99_s},
        waiting_s: waiting / n, execution_s: execution / n, overhead_s: overhead / n,
      };
    });
}

/** At most `points` points of the last `span` seconds: neighbours become one, weighted by their ended actions. */
export function thinned(history, now, span, points) {
  const recent = history.filter((bucket) => bucket.from_s + BUCKET_S > now - span);
  const size = Math.max(1, Math.ceil(span / BUCKET_S / points));
  const groups = new Map();
  for (const bucket of recent) {
    // By the number of the bucket and not from the first one, so that groups stay the same over time.
    const group = Math.floor(Math.round(bucket.from_s / BUCKET_S) / size);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(bucket);
  }
  return {step_s: size * BUCKET_S, points: [...groups.values()].map((group) => merged(group, size * BUCKET_S))};
}

function merged(group, length) {
  const ended = group.reduce((sum, bucket) => sum + bucket.ended, 0);
  const mean = (key) => (ended ? group.reduce((sum, b) => sum + b[key] * b.ended, 0) / ended : null);
  const perAction = (key) => (ended ? group.reduce((sum, b) => sum + b[key], 0) / ended : null);
  const busy = Object.create(null); // pools may have any name
  for (const bucket of group) {
    for (const [pool, part] of Object.entries(bucket.busy ?? {})) busy[pool] = (busy[pool] ?? 0) + part / group.length;
  }
  return {
    from_s: group[0].from_s, middle_s: group[0].from_s + length / 2, ended,
    p50_s: mean("p50_s"), p95_s: mean("p95_s"), p99_s: mean("p99_s"),
    waiting_s: perAction("waiting_s"), execution_s: perAction("execution_s"), overhead_s: perAction("overhead_s"),
    busy,
  };
}
