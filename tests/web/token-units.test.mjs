// Conversion of the server's tokens to units of the document.

import assert from "node:assert/strict";
import { test } from "node:test";
import { fill, gaps, placed, single, within } from "../../app/web/tokens/token-units.js";

const STAR = [0xe2, 0x98, 0x85]; // a character of three bytes
const FACE = [0xf0, 0x9f, 0x98, 0x80]; // a character of two UTF-16 units

test("a unit with several tokens is split into one unit per token", () => {
  assert.deepEqual(cut("Once upon", [token("Once"), token(" upon")]), [[0, 4, ["Once"]], [4, 9, [" upon"]]]);
});

test("tokens that share a character, by their bytes, stay together", () => {
  const parts = STAR.map((byte) => bytes([byte]));
  const units = single([{ start: 0, end: 3, tokens: [token("a"), ...parts, token("b")] }], "a\u2605b");
  assert.deepEqual(units.map(({ start, end, tokens }) => [start, end, tokens.length]), [[0, 1, 1], [1, 2, 3], [2, 3, 1]]);
  assert.deepEqual(units[1].tokens, parts);
});

test("offsets count UTF-16 units", () => {
  const tokens = [bytes(FACE.slice(0, 2)), bytes(FACE.slice(2)), token("!")];
  const units = single([{ start: 5, end: 8, tokens }], "12345\u{1F600}!");
  assert.deepEqual(units.map(({ start, end }) => [start, end]), [[5, 7], [7, 8]]);
});

test("a token may end one character and begin another", () => {
  const tokens = [bytes(STAR.slice(0, 2)), bytes([STAR[2], STAR[0]]), bytes(STAR.slice(1))];
  const units = single([{ start: 0, end: 2, tokens }], "\u2605\u2605");
  assert.deepEqual(units.map(({ start, end, tokens }) => [start, end, tokens.length]), [[0, 1, 2], [1, 2, 1]]);
  const broken = single([{ start: 0, end: 2, tokens: tokens.slice(0, 2) }], "\u2605\ufffd");
  assert.deepEqual(broken.map(({ start, end }) => [start, end]), [[0, 2]]);
});

test("bytes that are not a character become a separate U+FFFD", () => {
  const units = single([{ start: 0, end: 2, tokens: [bytes([0xe2]), token("a")] }], "\ufffda");
  assert.deepEqual(units.map(({ start, end }) => [start, end]), [[0, 1], [1, 2]]);
});

test("line ends become LF, however the model wrote them", () => {
  assert.deepEqual(cut("a\nb\nc", [token("a\r"), token("\nb"), token("\rc")]), [
    [0, 2, ["a\r"]],
    [2, 3, ["\nb"]],
    [3, 5, ["\rc"]],
  ]);
});

test("text that the server removed is not in the units", () => {
  assert.deepEqual(cut("Once up", [token(" Once"), token(" upon")]), [[0, 4, [" Once"]], [4, 7, [" upon"]]]);
  assert.deepEqual(cut("end", [token("end"), bytes([])]), [[0, 3, ["end"]]], "an end-of-text token is not part of the text");
});

test("a unit whose tokens spell another text loses its tokens", () => {
  assert.deepEqual(single([{ start: 0, end: 3, tokens: [token("xyz")] }], "abc"), [{ start: 0, end: 3, tokens: null }]);
});

test("offsets are converted from code points; tokens with equal spans form one unit, and added tokens none", () => {
  const tokens = ["<s>", "a", "1", "2", "b"].map((text) => ({ text }));
  const spans = [[0, 0], [0, 1], [1, 2], [1, 2], [2, 4]].map(([start, end]) => ({ start, end }));
  assert.deepEqual(placed(tokens, spans, "a\u{1F600}bc"), [
    { start: 0, end: 1, tokens: [tokens[1]] },
    { start: 1, end: 3, tokens: [tokens[2], tokens[3]] },
    { start: 3, end: 5, tokens: [tokens[4]] },
  ]);
});

test("gaps are the spans without known tokens", () => {
  const known = (start, end) => ({ start, end, tokens: [{ logprob: -1, top: [{}] }] });
  assert.deepEqual(gaps([], 3), [[0, 3]]);
  assert.deepEqual(gaps([known(2, 4), known(4, 6), { start: 6, end: 7, tokens: null }], 9), [[0, 2], [6, 9]]);
  assert.deepEqual(gaps([known(0, 9)], 9), []);
  assert.deepEqual(gaps([{ start: 0, end: 1, tokens: [{ logprob: null, top: [] }] }], 1), [], "the first token has no alternatives");
  assert.deepEqual(gaps([{ start: 0, end: 1, tokens: [{ logprob: -1, top: [] }] }], 1), [[0, 1]]);
  assert.deepEqual(gaps([], 0), []);
});

test("within() clips units at its borders", () => {
  const unit = (start, end) => ({ start, end, tokens: [] });
  assert.deepEqual(within([unit(0, 2), unit(2, 5), unit(5, 8), unit(8, 9)], [3, 6]), [unit(3, 5), unit(5, 6)]);
});

function cut(text, tokens) {
  const units = single([{ start: 0, end: text.length, tokens }], text);
  return units.map(({ start, end, tokens }) => [start, end, tokens.map(({ text }) => text)]);
}

function token(text) {
  return { text, bytes: [...new TextEncoder().encode(text)] };
}

function bytes(list) {
  return { text: "\ufffd", bytes: list };
}

test("fill sends no request where every token was streamed", async () => {
  const units = [{ start: 0, end: 1, tokens: [streamed("a")] }, { start: 1, end: 3, tokens: [streamed("b"), streamed("c")] }];
  const filled = await fill("abc", units, {});
  assert.deepEqual(filled.units.map(({ start, end }) => [start, end]), [[0, 1], [1, 2], [2, 3]]);
  assert.equal(filled.unread, 0);
});

test("fill scores tokens that were not streamed, and keeps streamed details", async () => {
  const server = new Server(100);
  const units = [{ start: 2, end: 4, tokens: [streamed("cd")] }, { start: 4, end: 5, tokens: null }];
  const { units: all } = await fill("abcdef", units, server);
  assert.equal(described(all), "a? b? cd! e? f?");
  assert.deepEqual(server.requests, ["tokenize abcdef", "score 0,1,2,3,4,5 20"]);
});

test("fill scores a position without alternatives again", async () => {
  const server = new Server(100);
  const { units } = await fill("ab", [{ start: 0, end: 1, tokens: [{ ...streamed("a"), top: [] }] }], server);
  assert.equal(described(units), "a? b?");
});

test("fill clips a token that overlaps streamed text", async () => {
  const server = new Server(100, 2);
  const { units } = await fill("abcdef", [{ start: 3, end: 4, tokens: [streamed("d")] }], server);
  assert.deepEqual(units.map(({ start, end }) => [start, end]), [[0, 2], [2, 3], [3, 4], [4, 6]]);
});

test("fill scores the end of a text that is longer than the context", async () => {
  const server = new Server(2);
  const { units, unread } = await fill("abcd", [], server);
  assert.equal(described(units), "c? d?");
  assert.equal(unread, 2);
  assert.deepEqual(server.requests, ["tokenize abcd", "score 2,3 20"]);
});

test("fill passes on its signal, and reports errors", async () => {
  const server = new Server(9);
  server.signal = AbortSignal.abort(new Error("superseded"));
  await assert.rejects(fill("abcd", [], server), /superseded/);
});

class Server {
  requests = [];

  constructor(context, width = 1) {
    this.tokenize = async (text, signal) => {
      signal?.throwIfAborted();
      this.requests.push(`tokenize ${text}`);
      const starts = Array.from({ length: text.length / width }, (_, index) => index * width);
      const pieces = starts.map((start) => ({ start, end: start + width }));
      return { tokens: starts.map((start) => start / width), pieces, max_model_len: context };
    };
    this.score = async (ids, logprobs) => {
      this.requests.push(`score ${ids} ${logprobs}`);
      return { scores: [{ tokens: ids.map((id) => ({ id, text: "abcdef"[id] + "?" })) }] };
    };
  }
}

function streamed(text) {
  return { text, bytes: [...new TextEncoder().encode(text)], says: text + "!", logprob: -1, top: [{}] };
}

function described(units) {
  return units.map(({ tokens }) => tokens[0].says ?? tokens[0].text).join(" ");
}
