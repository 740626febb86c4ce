// The request body is what the user typed: exact numbers, lists and JSON, and no field can inject another.

import assert from "node:assert/strict";
import test from "node:test";
import { bodyOf, literal, parseExact, requestBody, requestFields, typedAs } from "../../app/web/request/request-body.js";
import { allowed, complaint, hint } from "../../app/web/request/value-range.js";

const kinds = (...pairs) => pairs.map(([name, kind]) => ({ name, kind }));

test("a body is JSON with the typed fields only", () => {
  const parameters = kinds(["temperature", "number"], ["stop", "texts"], ["regex", "text"], ["ignore_eos", "boolean"]);
  const typed = { temperature: " 0.70 ", stop: "\\n\\n\n END", regex: " a+ ", ignore_eos: "true", top_p: "", n: "3" };
  assert.deepEqual(JSON.parse(requestBody('Say "hi"\n', typed, parameters)), {
    prompt: 'Say "hi"\n',
    stream: true,
    temperature: 0.7,
    stop: ["\n\n", " END"],
    regex: " a+ ",
    ignore_eos: true,
    n: 3,
  });
  assert.equal(requestBody("a", {}), '{"prompt":"a","stream":true}');
});

test("before the schema is known, numbers are sent as numbers and everything else as text", () => {
  const body = requestBody("", { temperature: "0.5", source: "12", regex: "[ab]", seed: "-9223372036854775808" });
  assert.ok(body.endsWith('"temperature":0.5,"source":"12","regex":"[ab]","seed":-9223372036854775808}'), body);
});

test("integers keep every digit", () => {
  for (const seed of ["9007199254740993", "9223372036854775807", "-9223372036854775808", "0"]) {
    assert.equal(literal("integer", seed), seed);
    assert.equal(typedAs("integer", parseExact(`{"seed": ${seed}}`).seed), seed);
  }
  assert.equal(literal("integer", "+007"), "7");
  assert.equal(literal("integers", "1, 9007199254740993;3"), '[1,"9007199254740993;3"]');
  assert.equal(literal("integers", " 1,2  3\n4 "), "[1,2,3,4]");
  assert.equal(literal("integers", " , "), null);
});

test("an indented body has the same content", () => {
  const fields = requestFields("a", { n: "2" });
  assert.equal(bodyOf(fields, "  "), '{\n  "prompt": "a",\n  "stream": true,\n  "n": 2\n}');
  assert.deepEqual(JSON.parse(bodyOf(fields, "  ")), JSON.parse(bodyOf(fields)));
});

test("invalid numbers are sent as strings, for the server to reject", () => {
  for (const text of ["warm", "0,7", "0x10", "1e999", "Infinity", "NaN", "1 2", "--1", '"', "}", "true"]) {
    assert.equal(literal("number", text), JSON.stringify(text), text);
  }
  const read = ["1e3", ".5", "5.", "-0.0", "1E-2"].map((text) => literal("number", text));
  assert.deepEqual(read, ["1000", "0.5", "5", "0", "0.01"]);
});

test("no field can inject another field into the body", () => {
  const nasty = ['"', '\\"', '1,"n":16', "[1],\"n\":16", "{} , \"n\": 16", "\\", "a\u2028b", "\ud800", "null"];
  for (const kind of ["integer", "number", "boolean", "text", "texts", "integers", "json", undefined]) {
    for (const text of nasty) {
      const body = JSON.parse(requestBody("p", { field: text }, [{ name: "field", kind }]));
      assert.deepEqual(Object.keys(body), ["prompt", "stream", "field"], `${kind} ${text}`);
    }
  }
});

test("JSON is sent unchanged, and invalid JSON as a string", () => {
  assert.equal(literal("json", ' {"50": -100, "big": 9007199254740993} '), '{"50": -100, "big": 9007199254740993}');
  assert.equal(literal("json", "{oops"), '"{oops"');
});

test("values shown as typed text are sent as the same values", () => {
  const values = {
    number: [0.1, 1e-7, 1e21, -2],
    integer: [0, -5],
    boolean: [true, false],
    text: ["a", " \n\\d+", "5", "[1]"],
    texts: [["a\nb", "\\n", "\t\r", " x "], "one"],
    integers: [[1, 2, 50256]],
    json: [{ 50: -100 }, [], {}, true, "plain", '{"type": "object"}'],
  };
  for (const [kind, list] of Object.entries(values)) {
    for (const value of list) {
      const sent = JSON.parse(literal(kind, typedAs(kind, value)));
      assert.deepEqual(sent, kind === "texts" ? [value].flat() : value, `${kind} ${JSON.stringify(value)}`);
    }
  }
  assert.equal(typedAs("number", null), "");
});

test("long integers are kept exact outside of strings only", () => {
  const json = '{"a": 9007199254740993, "b": "x 9007199254740993 \\" 9007199254740993", "c": 0.12345678901234567}';
  assert.deepEqual(parseExact(json), { a: "9007199254740993", b: 'x 9007199254740993 " 9007199254740993', c: 0.12345678901234567 });
  const numbers = [9007199254740991, -1e22, 12345678901234567.5];
  assert.deepEqual(parseExact("[9007199254740991, -1e22, 12345678901234567.5]"), numbers);
});

test("complaints state the allowed range in words", () => {
  const temperature = { kind: "number", minimum: 0, maximum: 10 };
  for (const text of ["", " ", "0", "10", "9.99", "1e1"]) assert.equal(complaint(temperature, text), "", text);
  for (const text of ["-0.1", "10.01", "hot", "0,7"]) {
    assert.equal(complaint(temperature, text), "Allowed: a number from 0 to 10.", text);
  }
  const seed = { kind: "integer", minimum: -(2 ** 63), below: 2 ** 63 };
  assert.equal(allowed(seed), "a whole number from -9223372036854775808 to 9223372036854775807");
  assert.equal(complaint(seed, "9223372036854775807"), "");
  for (const text of ["9223372036854775808", "-9223372036854775809", "1.5", "x"]) {
    assert.notEqual(complaint(seed, text), "", text);
  }
  assert.equal(allowed({ kind: "number", above: 0, maximum: 1 }), "a number above 0 and at most 1");
  assert.equal(allowed({ kind: "number", above: 0 }), "a number above 0");
  assert.equal(complaint({ kind: "number", above: 0 }, "0"), "Allowed: a number above 0.");
  assert.equal(allowed({ kind: "integer" }), "a whole number");
});

test("complaints state the limits of lists and texts", () => {
  const stop = { kind: "texts", minLength: 1, maxLength: 3, maxItems: 2 };
  assert.equal(complaint(stop, "abc\n\\n\\n\\n"), "");
  assert.equal(complaint(stop, "\u{1f600}\u{1f600}\u{1f600}"), "", "counts characters, not UTF-16 units");
  for (const text of ["abcd", "a\nb\nc"]) {
    const words = "one text a line (\\n for a line end), at most 2 lines of 1 to 3 characters each";
    assert.equal(complaint(stop, text), `Allowed: ${words}.`);
  }
  const ids = { kind: "integers", minimum: 0, below: 2 ** 31, maxItems: 3 };
  assert.equal(complaint(ids, "1, 2 3"), "");
  for (const text of ["-1", "2147483648", "1 2 3 4", "1.5", "x"]) {
    assert.equal(complaint(ids, text), "Allowed: whole numbers from 0 to 2147483647, at most 3 of them.", text);
  }
  assert.equal(complaint({ kind: "json" }, "{"), "Allowed: JSON.");
  assert.equal(complaint({ kind: "json" }, '{"5": 1}'), "");
  assert.equal(complaint({ kind: "boolean" }, "maybe"), "Allowed: on or off.");
  assert.equal(complaint({ kind: "text", choices: ["low", "high"] }, "mid"), "Allowed: one of low, high.");
});

test("hints leave out limits that ordinary values never reach", () => {
  const hasHint = (parameter) => hint(parameter) !== "";
  assert.ok(hasHint({ kind: "number", minimum: 0, maximum: 10 }) && hasHint({ kind: "number", above: 0 }));
  assert.ok(hasHint({ kind: "texts" }) && hasHint({ kind: "integer", minimum: 1, maximum: 16 }) && hasHint({ kind: "text", maxLength: 9 }));
  const wide = { kind: "integer", minimum: 0, below: 2 ** 31 };
  for (const parameter of [wide, { kind: "integer" }, { kind: "json" }, { kind: "text" }]) {
    assert.equal(hint(parameter), "", parameter.kind);
  }
});
