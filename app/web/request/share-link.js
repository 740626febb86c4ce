// Encodes a text and its settings as the fragment of a link, and decodes it. Browsers do not send fragments to the
// server: only people with the link have the text. The first letter is the format: "a" is deflated JSON in base64url.
// Pure.

const VERSION = "a";
const FORM = /^#?([a-z])\.([A-Za-z0-9_-]+)$/;
const MOST_LINK = 30_000; // characters: mail programs and chats cut longer ones
const MOST_TEXT = 4_000_000; // bytes that a link may unpack to
const BROKEN = "This link is broken: a part of it is missing or was changed. Your own text is untouched.";

/** A text cannot be shared or opened. The message is for the user. */
export class ShareError extends Error {}

/** The fragment, with its "#", of `text` and `typed` (the settings as typed; empty ones are left out). */
export async function encode({ text, typed }) {
  const settings = Object.fromEntries(Object.entries(typed).filter(([, value]) => value !== ""));
  const bytes = new TextEncoder().encode(JSON.stringify({ text, typed: settings }));
  const packed = await through(new CompressionStream("deflate-raw"), bytes);
  const fragment = `#${VERSION}.${base64url(packed)}`;
  if (fragment.length <= MOST_LINK) return fragment;
  const [size, most] = [Math.ceil(fragment.length / 1000), MOST_LINK / 1000];
  const why = `it would have ${size} kB, and above ${most} kB links break on their way`;
  throw new ShareError(`The text is too long for a link: ${why}. Send the text itself.`);
}

/** Whether a fragment looks like one of encode(). */
export function isShared(fragment) {
  return FORM.test(fragment) || fragment.startsWith(`#${VERSION}.`);
}

/** { text, typed } of a fragment. Throws ShareError if it is invalid. */
export async function decode(fragment) {
  const [, version, data] = fragment.match(FORM) ?? [];
  if (data === undefined) throw new ShareError(BROKEN);
  if (version !== VERSION) throw new ShareError("This link was made by a newer inkstream: this one cannot read it.");
  return checked(await unpacked(data));
}

async function unpacked(data) {
  try {
    const bytes = await through(new DecompressionStream("deflate-raw"), fromBase64url(data));
    return JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
  } catch (error) {
    throw error instanceof ShareError ? error : new ShareError(BROKEN);
  }
}

// The link is untrusted input.
function checked(state) {
  const { text, typed } = state ?? {};
  const isSetting = ([name, value]) => /^[a-z][a-z0-9_]{0,63}$/.test(name) && typeof value === "string";
  const isSound = typeof text === "string" && typed?.constructor === Object && Object.entries(typed).every(isSetting);
  if (!isSound) throw new ShareError(BROKEN);
  return { text, typed };
}

async function through(transform, bytes) {
  const writer = transform.writable.getWriter();
  // The reader reports an error.
  writer.write(bytes).catch(() => {});
  writer.close().catch(() => {});
  const chunks = [];
  let size = 0;
  for (const reader = transform.readable.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return joined(chunks, size);
    chunks.push(value);
    size += value.length;
    if (size > MOST_TEXT) {
      reader.cancel().catch(() => {});
      throw new ShareError("This link holds more text than the page takes. Your own text is untouched.");
    }
  }
}

function joined(chunks, size) {
  const all = new Uint8Array(size);
  let at = 0;
  for (const chunk of chunks) {
    all.set(chunk, at);
    at += chunk.length;
  }
  return all;
}

function base64url(bytes) {
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

function fromBase64url(data) {
  return Uint8Array.from(atob(data.replaceAll("-", "+").replaceAll("_", "/")), (sign) => sign.charCodeAt(0));
}
