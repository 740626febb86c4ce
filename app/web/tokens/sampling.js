// What sampling leaves of the next token's distribution: temperature -> top_k -> typical_p -> top_p -> min_p, in the
// server's order and by its rules (docs/sampling.md): every filter is a threshold, and equals stay together.
// The server sends the most likely tokens; of the others only their total is known,
// and they are assumed to fall off as a power law from the last one that was sent, as words do. (Spread evenly instead, the
// shares after temperature and top_p were off by four times as much.) Pure.

import { restOf } from "./token.js";

export const OFF = { temperature: 1, top_k: 0, typical_p: 1, top_p: 1, min_p: 0 };
const GROUPS = 48; // of tokens that were not told
const STEEPEST = 1e4; // power law
const COLDEST = 1e-30; // temperatures below count as this one

/**
 * { shares, rest: { share, count }, exact }: the share of each token of `top` (most likely first), 0 for one that is
 * cut off, and of all others together with how many of them are left. `exact`: the server's own numbers, not estimates.
 */
export function sampled(top, vocabulary, settings) {
  const set = { ...OFF, ...settings };
  const groups = [...top.map(({ logprob }) => ({ logprob, count: 1 })), ...tail(top, vocabulary)];
  if (set.temperature === 0 || set.top_k === 1 || (set.top_p === 0 && set.typical_p === 1)) keepFirst(groups);
  else filter(groups, set);
  const total = sum(groups, massOf);
  const shares = groups.map((group) => massOf(group) / total);
  const others = groups.splice(top.length);
  const rest = { share: sum(shares.splice(top.length), (share) => share), count: sum(others, ({ count }) => count) };
  return { shares, rest, exact: others.length === 0 || isExact(top, set) };
}

function filter(groups, { temperature, top_k, typical_p, top_p, min_p }) {
  const best = groups[0].logprob;
  if (top_k > 0) keepCount(groups, top_k);
  for (const group of groups) group.scaled = (group.logprob - best) / Math.max(temperature, COLDEST);
  for (const group of groups) group.weight = group.count ? Math.exp(group.scaled) : 0;
  if (typical_p < 1) keepTypical(groups, typical_p);
  if (top_p === 0) return keepFirst(groups);
  if (top_p < 1) keepShare(groups, (group) => -group.weight, top_p);
  const least = min_p * Math.max(...groups.map(({ weight }) => weight));
  drop(groups, ({ weight }) => weight < least);
}

// The most likely one alone; the first of `top` is the lowest id among equals.
function keepFirst(groups) {
  const left = groups.map(({ weight = 1 }) => weight);
  const first = left.indexOf(Math.max(...left));
  groups.forEach((group, index) => Object.assign(group, index === first ? { weight: 1, count: 1 } : NOTHING));
}

function keepCount(groups, count) {
  let before = 0;
  const edge = groups.find((group) => (before += group.count) >= count);
  if (!edge) return;
  if (edge.count > 1) edge.count -= before - count; // these tokens differ, but by how much is unknown
  drop(groups, ({ logprob }) => logprob < edge.logprob);
}

function keepTypical(groups, share) {
  const total = sum(groups, massOf);
  const surprise = ({ scaled }) => Math.log(total) - scaled;
  const mean = sum(groups, (group) => (group.weight > 0 ? massOf(group) * surprise(group) : 0)) / total;
  keepShare(groups, (group) => Math.abs(surprise(group) - mean), share);
}

// The fewest tokens of least cost that reach this share of what is left, and their equals.
function keepShare(groups, cost, share) {
  const wanted = share * sum(groups, massOf);
  const costs = new Map(groups.map((group) => [group, cost(group)]));
  let before = 0;
  let edge = -Infinity;
  for (const group of groups.filter(({ weight }) => weight > 0).sort((a, b) => costs.get(a) - costs.get(b))) {
    edge = costs.get(group);
    if (before + massOf(group) >= wanted) {
      if (group.count > 1) group.count = Math.max(Math.ceil((wanted - before) / group.weight), 1);
      break;
    }
    before += massOf(group);
  }
  drop(groups, (group) => costs.get(group) > edge);
}

// Whether what was not told changes nothing: none of it is left for certain, or as much of it as there was.
function isExact(top, { temperature, top_k, typical_p, top_p, min_p }) {
  if (temperature === 0 || top_k === 1 || (top_p === 0 && typical_p === 1)) return true;
  const highest = Math.min(top.at(-1).logprob, Math.log(restOf(top))); // that one of them may have
  if (top_k > 0 && top_k <= top.length) return top[top_k - 1].logprob > highest;
  if (top_k > 0 || typical_p < 1) return false;
  const best = top[0].logprob;
  if (top_p === 1 && Math.exp((highest - best) / Math.max(temperature, COLDEST)) < min_p) return true;
  if (temperature !== 1) return false;
  if (top_p === 1) return min_p === 0;
  let reached = 0;
  const edge = top.find(({ logprob }) => (reached += Math.exp(logprob)) >= top_p);
  return edge !== undefined && edge.logprob > highest;
}

const NOTHING = { weight: 0, count: 0 };

function drop(groups, isOut) {
  for (const group of groups) if (isOut(group)) Object.assign(group, NOTHING);
}

function massOf({ weight, count }) {
  return weight * count;
}

function sum(groups, value) {
  return groups.reduce((total, group) => total + value(group), 0);
}

/** The tokens that the server did not send: groups of equals, { logprob, count }, from likely to unlikely; none where nothing is missing. */
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
  return at(solve((steepness) => mass(at(steepness)) - rest));
}

// Where a falling function meets 0, by halves.
function solve(excess) {
  let [low, high] = [0, STEEPEST];
  for (let step = 0; step < 60; step++) {
    const middle = (low + high) / 2;
    if (excess(middle) > 0) low = middle;
    else high = middle;
  }
  return high;
}

function mass(groups) {
  return groups.reduce((total, { logprob, count }) => total + Math.exp(logprob) * count, 0);
}
