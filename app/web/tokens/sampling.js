// The next token's distribution after temperature -> top_k -> typical_p -> top_p -> min_p, in the server's order and by
// its rules (docs/sampling.md): every filter is a threshold, and tokens with equal logits are kept or dropped together.
// The server sends the most likely tokens and only the total probability of the others, which are assumed to follow
// a power law from the last token sent, as word frequencies do (Zipf). With a uniform tail the shares after temperature
// and top_p were off by four times as much. Pure functions.

import { restOf } from "./token.js";

export const OFF = { temperature: 1, top_k: 0, typical_p: 1, top_p: 1, min_p: 0 };
const GROUPS = 48; // of tokens that the server did not send
const STEEPEST = 1e4; // highest exponent of the power law
const COLDEST = 1e-30; // lowest temperature; anything below is treated as this

/**
 * { shares, rest: { share, count }, exact }: the probability of each token of `top` (most likely first), 0 if it is
 * filtered out; the total probability and number of the other tokens that remain; and whether these are the server's
 * numbers rather than estimates.
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

// Keeps only the most likely token; among equals, the first of `top`, which has the lowest id.
function keepFirst(groups) {
  const left = groups.map(({ weight = 1 }) => weight);
  const first = left.indexOf(Math.max(...left));
  groups.forEach((group, index) => Object.assign(group, index === first ? { weight: 1, count: 1 } : NOTHING));
}

function keepCount(groups, count) {
  let before = 0;
  const edge = groups.find((group) => (before += group.count) >= count);
  if (!edge) return;
  if (edge.count > 1) edge.count -= before - count; // the tokens of a group differ by an unknown amount
  drop(groups, ({ logprob }) => logprob < edge.logprob);
}

function keepTypical(groups, share) {
  const total = sum(groups, massOf);
  const surprise = ({ scaled }) => Math.log(total) - scaled;
  const mean = sum(groups, (group) => (group.weight > 0 ? massOf(group) * surprise(group) : 0)) / total;
  keepShare(groups, (group) => Math.abs(surprise(group) - mean), share);
}

// Keeps the fewest tokens of lowest cost that reach this share of the remaining probability, and their equals.
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

// Whether the result does not depend on the tokens that the server did not send: all of them are certainly filtered out,
// or none is.
function isExact(top, { temperature, top_k, typical_p, top_p, min_p }) {
  if (temperature === 0 || top_k === 1 || (top_p === 0 && typical_p === 1)) return true;
  const highest = Math.min(top.at(-1).logprob, Math.log(restOf(top))); // possible logprob of a token not sent
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

/** The tokens that the server did not send, as groups of equal probability { logprob, count }, most likely first. */
export function tail(top, vocabulary) {
  const rest = restOf(top);
  const [sent, last] = [top.length, top.at(-1)?.logprob];
  if (vocabulary <= sent || rest === 0) return [];
  const edges = Array.from({ length: GROUPS + 1 }, (_, i) => Math.round(sent * (vocabulary / sent) ** (i / GROUPS)));
  const groups = [...new Set(edges)].slice(1).map((to, i, all) => ({ from: (all[i - 1] ?? sent) + 1, to }));
  const at = (steepness) =>
    groups.map(({ from, to }) => {
      const rank = (from + to) / 2 / sent; // as a multiple of the last sent token's
      return { logprob: last - steepness * Math.log(rank), count: to - from + 1 };
    });
  return at(solve((steepness) => mass(at(steepness)) - rest));
}

// The root of a decreasing function, by bisection.
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
