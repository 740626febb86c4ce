// documents/file-formats.js: exports can be imported unchanged, and damaged files are refused by name.

import assert from "node:assert/strict";
import test from "node:test";
import { DocumentError, exported, exportedAll, imported, nameOf } from "../../app/web/documents/file-formats.js";
import { Tree } from "../../app/web/text/tree.js";

const bytes = (text) => new TextEncoder().encode(text);

const facts = (seed, more = {}) => ({ typed: { top_k: "3" }, at: 4, index: 0, count: 1, seed, ...more });

function written() {
  const tree = new Tree({ text: "Once", units: [] });
  tree.commit("run", { text: "Once upon", units: [{ start: 4, end: 9, tokens: null }] }, facts("7", { receipt: { seed: "7" } }));
  tree.undo();
  tree.commit("run", { text: "Once more", units: [{ start: 4, end: 9, tokens: null }] }, facts("8"));
  return { tree: tree.data, settings: { temperature: "0.5", seed: "9007199254740993" }, truncation: { agreed: null, always: true } };
}

test("an imported document has all branches, receipts, settings and the title", () => {
  for (const title of [null, 'A "title"']) {
    const { name, type, content } = exported("json", { title, state: written() });
    assert.equal(type, "application/json");
    assert.deepEqual(imported(name, bytes(content)), [{ title, state: written() }]);
  }
});

test("one file holds all documents, and a damaged one imports none", () => {
  const documents = [{ title: "A", state: written() }, { title: null, state: { ...written(), settings: {} } }];
  const { name, content } = exportedAll(documents);
  assert.match(name, /^inkstream-\d{4}-\d\d-\d\d\.json$/);
  assert.deepEqual(imported(name, bytes(content)), documents);
  assert.throws(() => imported(name, bytes(content.replace('"title": "A"', '"title": 7'))), DocumentError);
});

test("text and Markdown exports have the current text, and can be imported", () => {
  const state = written();
  assert.deepEqual(exported("txt", { title: "T", state }), { name: "T.txt", type: "text/plain", content: "Once more" });
  const { name, content } = exported("md", { title: "T", state });
  assert.equal(content, "# T\n\nOnce more\n");
  const [back] = imported(name, bytes(content));
  assert.equal(back.title, "T");
  assert.equal(Tree.from(back.state.tree).current.state.text, "Once more");
  assert.equal(exported("md", { title: null, state }).content, "Once more\n", "without a title there is no heading");
});

test("a text file becomes a document with its name and LF line ends", () => {
  const [{ title, state }] = imported("My story.txt", bytes("\ufeffOne\r\ntwo\rthree"));
  assert.equal(title, "My story");
  assert.equal(Tree.from(state.tree).current.state.text, "One\ntwo\nthree");
  assert.equal(state.settings, null);
  assert.equal(imported("noformat", bytes("a"))[0].title, "noformat");
});

test("files that are damaged, too large or not text are refused by name", () => {
  const refused = (content, message) => {
    assert.throws(() => imported("a.JSON", bytes(content)), { constructor: DocumentError, message }, content);
  };
  assert.throws(() => imported("a.txt", new Uint8Array([0xff, 0xfe, 0])), { constructor: DocumentError, message: /^a\.txt is not text in UTF-8/ });
  assert.throws(() => imported("a.txt", { length: 2e8 }), { constructor: DocumentError, message: /^a\.txt is larger than 100 MB/ });
  const whole = { format: "inkstream document", version: 1, title: null, ...written() };
  assert.ok(imported("a.json", bytes(JSON.stringify(whole))), "the control");
  const change = (node) => ({ tree: { ...whole.tree, nodes: whole.tree.nodes.map((one) => (one.kind === "run" ? { ...one, ...node } : one)) } });
  const wrong = [{ tree: null }, { tree: { nodes: [], current: 0 } }, { settings: { n: 2 } }, { settings: null }, { title: 7 }, { version: 2 }];
  wrong.push(...[{ kind: "x" }, { id: "1" }, { start: -1 }, { parent: 99 }, { written: [[1]] }, { written: null }, { facts: {} }].map(change));
  wrong.push(...[{ receipt: 5 }, { receipt: { settings: 5 } }, { typed: { n: 2 } }, { at: 1.5 }, { preset: 1 }].map((more) => change({ facts: facts("1", more) })));
  // The key of this service must not be sent to another origin, however the origin is spelled.
  const origins = ["//b.example", "HTTPS://b.example", " https://b.example", "https://b.example/", "b.example"];
  wrong.push(...origins.map((origin) => change({ facts: facts("1", { origin }) })));
  const elsewhere = { ...whole, ...change({ facts: facts("1", { origin: "https://b.example:8001" }) }) };
  assert.ok(imported("a.json", bytes(JSON.stringify(elsewhere))), "the control");
  for (const one of wrong) refused(JSON.stringify({ ...whole, ...one }), /^a\.JSON is not a document of this page, or it is damaged/);
  for (const content of ["", "[]", "null", "{", '"a"', JSON.stringify(whole).slice(0, -9)]) refused(content, /^a\.JSON is not/);
});

test("a document is named by its title or its beginning, and file names are made valid", () => {
  assert.equal(nameOf({ title: "T", text: "a" }), "T");
  assert.equal(nameOf({ title: null, text: "\n  Once upon\na time" }), "Once upon");
  assert.equal(nameOf({ title: null, text: "word ".repeat(30) }), `${"word ".repeat(9).trim()} \u2026`);
  assert.equal(nameOf({ title: null, text: " \n" }), "Untitled");
  const named = (title) => exported("txt", { title, state: written() }).name;
  assert.deepEqual(["../a/b", "a:b?", "...", "\u00fc\u4e2d"].map(named), ["a b.txt", "a b.txt", "document.txt", "\u00fc\u4e2d.txt"]);
});
