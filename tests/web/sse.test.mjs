// sse.js against the rules of the standard, with streams split at every byte.

import assert from "node:assert/strict";
import test from "node:test";

import { SseParser } from "../../app/web/request/sse.js";

const STREAM =
  "\ufeffid: a:1\n: hello\nevent: start\ndata: {\"seed\": 1}\n\n" + // a byte order mark, a comment, a plain event
  "event: token\r\ndata: \u00e9\u4e2d\u{1f600}\r\n\r\n" + // CR LF; code points of two, three and four bytes
  "event:token\rdata:no space\rdata:  two spaces\rdata\r\r" + // CR; data of three lines, the last one empty
  ": ping\ndata: unnamed\nretry: 10\nid: b\0c\nunknown: x\n\n" + // no type; ids with NUL and unknown fields ignored
  "event: lost\n\nid: a:2\ndata: a: b\u2028c\n\n" + // no data, no event; U+2028 is no line end here
  "data: never finished\n";
const EVENTS = [
  { type: "start", data: '{"seed": 1}', id: "a:1" },
  { type: "token", data: "\u00e9\u4e2d\u{1f600}", id: "a:1" },
  { type: "token", data: "no space\n two spaces\n", id: "a:1" },
  { type: "message", data: "unnamed", id: "a:1" },
  { type: "message", data: "a: b\u2028c", id: "a:2" },
];
const bytes = (text) => new TextEncoder().encode(text);

function parse(...chunks) {
  const parser = new SseParser();
  return chunks.flatMap((chunk) => parser.feed(chunk));
}

test("a stream gives the same events however it is split", () => {
  const all = bytes(STREAM);
  for (let i = 0; i <= all.length; i++)
    for (let j = i; j <= Math.min(i + 8, all.length); j++)
      assert.deepEqual(parse(all.slice(0, i), all.slice(i, j), all.slice(j)), EVENTS, `cut at ${i} and ${j}`);
  assert.deepEqual(parse(...Array.from(all, (byte) => Uint8Array.of(byte))), EVENTS);
});

test("an event is returned with the last byte of its final line end", () => {
  for (const end of ["\n", "\r", "\r\n"]) {
    const block = bytes(`data: x${end}${end}`);
    const parser = new SseParser();
    const counts = Array.from(block, (byte) => parser.feed(Uint8Array.of(byte)).length);
    // A CR alone ends a line, so the block is complete after CR LF CR.
    const first = block.length - (end === "\r\n" ? 1 : 0);
    assert.deepEqual(counts.flatMap((count, i) => (count ? [i + 1] : [])), [first]);
  }
});
