// Documents as files: plain text, Markdown, and JSON, which alone has the history, the settings and the receipts. Pure.

import { Tree } from "../text/tree.js";

const FORMAT = "inkstream document";
const COLLECTION = "inkstream documents";
const MOST_BYTES = 100e6;
const TITLE_LENGTH = 48;
const TYPES = { txt: "text/plain", md: "text/markdown", json: "application/json" };

/** What a menu calls the formats of one document. */
export const EXPORTS = { txt: "Export as text", md: "Export as Markdown", json: "Export everything as JSON" };

/** What the page cannot do with a document; the message is for the user. */
export class DocumentError extends Error {}

/** The name of a document: its title, or the beginning of its text. */
export function nameOf({ title, text }) {
  if (title) return title;
  const line = /\S[^\n]*/.exec(text)?.[0].trim() ?? "Untitled";
  if (line.length <= TITLE_LENGTH) return line;
  return `${line.slice(0, TITLE_LENGTH).replace(/\s+\S*$/, "")} \u2026`;
}

/** { name, type, content } of a document as a file. `state`: { tree, settings, truncation }. */
export function exported(format, { title, state }) {
  const { text } = Tree.from(state.tree).current.state;
  const contents = {
    txt: () => text,
    md: () => (title ? `${heading(title)}${text}\n` : `${text}\n`),
    json: () => written({ format: FORMAT, version: 1, title, text, ...state }),
  };
  return { name: `${fileName(nameOf({ title, text }))}.${format}`, type: TYPES[format], content: contents[format]() };
}

/** All documents, [{ title, state }, ...], as one file. */
export function exportedAll(documents) {
  const content = written({ format: COLLECTION, version: 1, documents: documents.map(({ title, state }) => ({ title, ...state })) });
  return { name: `inkstream-${new Date().toISOString().slice(0, 10)}.json`, type: TYPES.json, content };
}

function written(data) {
  return `${JSON.stringify(data, null, 1)}\n`;
}

/** [{ title, state }, ...]: the documents in a file; settings are null in a text. Throws DocumentError. */
export function imported(name, bytes) {
  if (bytes.length > MOST_BYTES) throw new DocumentError(`${name} is larger than ${MOST_BYTES / 1e6} MB. Split it first.`);
  const content = decoded(name, bytes).replace(/\r\n?/g, "\n");
  const [, stem, format] = /^(.*?)(?:\.(\w+))?$/s.exec(name);
  if (format?.toLowerCase() === "json") return parsed(name, content);
  const isOwn = format === "md" && content.startsWith(heading(stem)); // the heading that exported() wrote
  const text = isOwn ? content.slice(heading(stem).length).replace(/\n$/, "") : content;
  const tree = new Tree({ text, units: [] }).data;
  return [{ title: stem || null, state: { tree, settings: null, truncation: null } }];
}

function heading(title) {
  return `# ${title}\n\n`;
}

function decoded(name, bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new DocumentError(`${name} is not text in UTF-8. Save it as UTF-8, or paste its text.`);
  }
}

function parsed(name, content) {
  try {
    const { format, version, documents, ...one } = JSON.parse(content);
    check((format === FORMAT || format === COLLECTION) && version === 1);
    return (format === COLLECTION ? documents : [one]).map(checked);
  } catch {
    const how = `"${EXPORTS.json}" writes one.`;
    throw new DocumentError(`${name} is not a document of this page, or it is damaged. ${how}`);
  }
}

function checked({ title, tree, settings, truncation }) {
  check(title === null || typeof title === "string");
  check(isTexts(settings));
  tree.nodes.forEach(checkNode);
  return { title, state: { tree: Tree.from(tree).data, settings, truncation } };
}

function checkNode({ id, kind, start, removed, written, facts }) {
  check([id, start, removed, ...written.flat()].every(isCount) && written.every((span) => span.length === 2));
  check(kind === "text" || kind === "run");
  if (kind === "text") return;
  const { typed, at, index, count, seed = "", finish = "", preset = "", origin = "", dropped = "", receipt = {} } = facts;
  check(isTexts(typed) && [at, index, count].every(isCount));
  check(!origin || (URL.canParse(origin) && new URL(origin).origin === origin));
  check([seed, finish, preset, origin, dropped].every((text) => typeof text === "string"));
  check(receipt.constructor === Object && (receipt.settings ?? {}).constructor === Object);
}

function check(isRight) {
  if (!isRight) throw new Error("damaged");
}

function isCount(value) {
  return Number.isSafeInteger(value) && value >= 0;
}

function isTexts(value) {
  return value?.constructor === Object && Object.values(value).every((text) => typeof text === "string");
}

// Without the characters that some file systems refuse.
function fileName(title) {
  return title.replace(/[\\/:*?"<>|\p{Cc}\u2026\s]+/gu, " ").replace(/^[. ]+| +$/g, "") || "document";
}
