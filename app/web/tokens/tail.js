// The tokens that the server did not send: their number and total are known, and they are assumed to fall off as a
// power law from the last one that was sent, as words do. Pure.
// Spread evenly instead, the shares after temperature and top_p were off by four times as much.

import { restOf } from "./token.js";

const GROUPS = 48;
const STEPEST = 1e4;

/** Groups of equals, { logprob, count }, from likely to unlikely; none where nothing is missing. */
export function tail(top, vocabulary) {
  const rest = restOf(top);
  const [told, last] = [top.length, top.at(-1)?.logprob];
  if (vocabulary <= told || rest === 0) return [];
  const edges = Array.from({ length: GROUPS + 1 }, (_, i) => Math.round(told * (vocabulary / told) ** (i / GROUPS)));
  const groups = [...new Set(edges)].slice(1).map((to, i, all) => ({ from: (all[i - 1] ?? told) + 1, to }));
  const at = (steepness) =>
    groups.map(({ from, to }) => {
      const place = (from + to) / 2 / told; // times the last one that was told
      return { logprob: last - steepness * Math.log(place), count: to - from + 1 };
    });
  return at(solve((steepness) => sum(at(steepness)) - rest));
}

// Where a falling function meets 0, by halves.
function solve(excess) {
  let [low, high] = [0, STEPEST];
  for (let step = 0; step < 60; step++) {
    const middle = (low + high) / 2;
    if (excess(middle) > 0) low = middle;
    else high = middle;
  }
  return high;
}

function sum(groups) {
  return groups.reduce((total, { logprob, count }) => total + Math.exp(logprob) * count, 0);
}
