// A link encodes a text and its settings exactly, and decoding rejects links that are broken or too long.

import assert from "node:assert/strict";
import test from "node:test";
import { deflateRawSync } from "node:zlib";
import { decode, encode, isShared, ShareError } from "../../app/web/request/share-link.js";

const pack = (text, version = "a") => `#${version}.${deflateRawSync(text).toString("base64url")}`;

// A text that does not compress, the same in every run.
function noise(length) {
  let state = 1;
  const sign = () => (state = (state * 48271) % 2147483647) % 94;
  return Array.from({ length }, () => String.fromCharCode(33 + sign())).join("");
}

test("any text and settings survive encoding and decoding", async () => {
  for (const text of ["", "Once", "\u{1f600} \u4e2d\r\n\t\0", "\ufeffbom", "\ud800 lone", '"\\$`', "a".repeat(100_000)]) {
    const typed = { temperature: "0.7", seed: "9007199254740993", stop: "\\n\n x" };
    assert.deepEqual(await decode(await encode({ text, typed })), { text, typed });
  }
});

test("a fragment needs no escaping and leaves out empty settings", async () => {
  const fragment = await encode({ text: "?&#%", typed: { top_p: "", n: "2" } });
  assert.match(fragment, /^#a\.[A-Za-z0-9_-]+$/);
  assert.equal(new URL(`http://x/${fragment}`).hash, fragment);
  assert.deepEqual((await decode(fragment)).typed, { n: "2" });
});

test("a text that is too long for a link is refused with an explanation", async () => {
  const refusal = encode({ text: noise(40_000), typed: {} });
  await assert.rejects(refusal, { constructor: ShareError, message: /too long for a link: .* \d+ kB/ });
  await encode({ text: noise(20_000), typed: {} });
});

test("a link truncated at any position or changed is reported", async () => {
  const whole = await encode({ text: "Once upon a time", typed: { n: "2" } });
  for (let cut = 3; cut < whole.length - 1; cut += 1) {
    await assert.rejects(decode(whole.slice(0, cut)), ShareError, `cut at ${cut}`);
  }
  for (const broken of ["#a.", "#a.!!", `${whole} and more`, "#a.AAAA", "#A.AAAA", ""]) {
    await assert.rejects(decode(broken), ShareError, broken);
  }
});

test("a link that decompresses to something else is refused", async () => {
  const typed = ["[]", '{"n": 2}', '{"<b>": "2"}', "null"].map((one) => `{"text": "a", "typed": ${one}}`);
  for (const state of ["1", "null", "[]", "{}", "{", "\u00ff", '{"text": 1, "typed": {}}', '{"text": "a"}', ...typed]) {
    await assert.rejects(decode(pack(state)), ShareError, state);
  }
  assert.deepEqual(await decode(pack('{"text": "a", "typed": {}, "more": 1}')), { text: "a", typed: {} });
  await assert.rejects(decode(pack(Buffer.from([0x22, 0xff, 0x22]))), ShareError);
});

test("a decompression bomb is refused before it is fully decompressed", async () => {
  const bomb = pack(Buffer.alloc(20_000_000, 32));
  assert.ok(bomb.length < 30_000, "the bomb fits into a link");
  await assert.rejects(decode(bomb), /more text than the page takes/);
});

test("a link of a newer version is reported as such", async () => {
  await assert.rejects(decode(pack("{}", "b")), /newer inkstream/);
});

test("other fragments are not treated as links", () => {
  for (const fragment of ["", "#", "#document", "#a", "#about.html!"]) assert.equal(isShared(fragment), false, fragment);
  for (const fragment of ["#a.AAAA", "#b.AAAA", "#a.br%20oken"]) assert.equal(isShared(fragment), true, fragment);
});
