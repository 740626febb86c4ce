// The tokens of a whole document, against a server that answers by hand: one character is one token.

import assert from "node:assert/strict";
import { test } from "node:test";
import { fill } from "../../app/web/tokens/fill.js";

test("fill sends no request where every token was streamed", async () => {
  const units = [{ start: 0, end: 1, tokens: [streamed("a")] }, { start: 1, end: 3, tokens: [streamed("b"), streamed("c")] }];
  const filled = await fill("abc", units, {});
  assert.deepEqual(filled.units.map(({ start, end }) => [start, end]), [[0, 1], [1, 2], [2, 3]]);
  assert.equal(filled.unread, 0);
});

test("what was not streamed is measured, and streamed detail stays", async () => {
  const server = new Server(100);
  const units = [{ start: 2, end: 4, tokens: [streamed("cd")] }, { start: 4, end: 5, tokens: null }];
  const { units: all } = await fill("abcdef", units, server);
  assert.equal(described(all), "a? b? cd! e? f?");
  assert.deepEqual(server.asked, ["tokenize abcdef", "score 0,1,2,3,4,5 20"]);
});

test("a position without alternatives is measured again", async () => {
  const server = new Server(100);
  const { units } = await fill("ab", [{ start: 0, end: 1, tokens: [{ ...streamed("a"), top: [] }] }], server);
  assert.equal(described(units), "a? b?");
});

test("of a token that reaches into streamed text its own part is shown", async () => {
  const server = new Server(100, 2);
  const { units } = await fill("abcdef", [{ start: 3, end: 4, tokens: [streamed("d")] }], server);
  assert.deepEqual(units.map(({ start, end }) => [start, end]), [[0, 2], [2, 3], [3, 4], [4, 6]]);
});

test("of a text that is longer than the context its end is measured", async () => {
  const server = new Server(2);
  const { units, unread } = await fill("abcd", [], server);
  assert.equal(described(units), "c? d?");
  assert.equal(unread, 2);
  assert.deepEqual(server.asked, ["tokenize abcd", "score 2,3 20"]);
});

test("a refusal of the server is reported, and the signal reaches it", async () => {
  const server = new Server(9);
  server.signal = AbortSignal.abort(new Error("superseded"));
  await assert.rejects(fill("abcd", [], server), /superseded/);
});

class Server {
  asked = [];

  constructor(context, width = 1) {
    this.tokenize = async (text, signal) => {
      signal?.throwIfAborted();
      this.asked.push(`tokenize ${text}`);
      const starts = Array.from({ length: text.length / width }, (_, index) => index * width);
      const pieces = starts.map((start) => ({ start, end: start + width }));
      return { tokens: starts.map((start) => start / width), pieces, max_model_len: context };
    };
    this.score = async (ids, logprobs) => {
      this.asked.push(`score ${ids} ${logprobs}`);
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
