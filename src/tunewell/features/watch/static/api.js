// Requests to the server: the token in a header, errors with the command line's own fix, and streams that resume.
import { signal } from './vendor/vendor.js';

const KEY = 'tunewell-token';
const API = 'api/v1/';
const RETRY_SECONDS = [0.5, 1, 2, 4];
const QUIET_SECONDS = 25;
// A browser opens six connections to one host. Further tabs ask again and again instead of holding one.
const NUM_STREAMS = 4;
const ASK_SECONDS = 2;
const CAUGHT_UP_SECONDS = 0.4;

/** Whether the server accepts the token: `missing`, `refused`, `ok`, or unknown before the first answer. */
export const access = signal(/** @type {'' | 'missing' | 'refused' | 'ok'} */ (''));
/** Whether the server answers at all. */
export const isOnline = signal(true);

let token = '';

/** What went wrong, where, and how to fix it, as the command line says it. */
export class ApiError extends Error {
  /** @param {number} status @param {{ what?: string, message?: string, where?: string | null, fix?: string | null }} [said] */
  constructor(status, said = {}) {
    super(said.what || said.message || `the server answered ${status}`);
    this.status = status;
    this.where = said.where ?? '';
    this.fix = said.fix ?? '';
  }
}

/** Take the token from the address, from this tab, or from another tab of this page; the address keeps none. */
export async function findToken() {
  const given = /^#token=([^&]+)/.exec(location.hash)?.[1] ?? '';
  if (given) history.replaceState(history.state, '', location.pathname + location.search + '#/');
  const channel = new BroadcastChannel(KEY);
  token = given || sessionStorage.getItem(KEY) || (await askOtherTabs(channel));
  channel.onmessage = ({ data }) => {
    if (data === 'which?' && token && access.value === 'ok') channel.postMessage({ token });
  };
  useToken(token);
}

/** @param {string} given */
export function useToken(given) {
  token = given.trim().replace(/^.*#token=/, '');
  access.value = token ? '' : 'missing';
  if (token) sessionStorage.setItem(KEY, token);
}

/** @param {BroadcastChannel} channel @returns {Promise<string>} */
function askOtherTabs(channel) {
  return new Promise((resolve) => {
    const give = setTimeout(() => resolve(''), 600);
    channel.onmessage = ({ data }) => {
      if (!data?.token) return;
      clearTimeout(give);
      resolve(String(data.token));
    };
    channel.postMessage('which?');
  });
}

/** Fetch a path of the API; an answer that is no success becomes an ApiError.
 * @param {string} path @param {RequestInit} [options] */
async function open(path, options = {}) {
  const headers = new Headers(options.headers);
  headers.set('Authorization', `Bearer ${token}`);
  /** @type {Response} */
  let answer;
  try {
    answer = await fetch(API + path, {
      cache: 'no-store',
      credentials: 'omit',
      redirect: 'error',
      ...options,
      headers,
    });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    isOnline.value = false;
    const fix = 'start `tunewell watch` again, and open the new address that it prints';
    throw new ApiError(0, { what: 'the server has ended; runs go on without it', fix });
  }
  isOnline.value = true;
  access.value = answer.status === 401 ? 'refused' : 'ok';
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new ApiError(answer.status, said.error ?? said);
}

/** An error that the page itself finds. @param {string} what @param {string} fix */
export const refusal = (what, fix) => new ApiError(400, { what, fix });

/** The JSON at a path. @param {string} path @param {AbortSignal} [signal] @returns {Promise<any>} */
export const get = async (path, signal) => (await open(path, { signal })).json();

/** Send JSON and return JSON. @param {string} path @param {unknown} [body] @param {string} [method] @returns {Promise<any>} */
export async function send(path, body = {}, method = 'POST') {
  const headers = { 'Content-Type': 'application/json' };
  return (await open(path, { method, headers, body: JSON.stringify(body) })).json();
}

/** Upload a file; the browser reads it while it is sent. @param {string} path @param {File} file @returns {Promise<any>} */
export async function upload(path, file) {
  const headers = { 'Content-Type': 'application/octet-stream' };
  return (await open(path, { method: 'POST', headers, body: file })).json();
}

/** Let the browser save a file of the folder. @param {string} path */
export async function download(path) {
  location.assign((await send('downloads', { path })).url);
}

/** Yield the events of an answer as server-sent events: `{id, name, data}`.
 * @param {Response} answer @param {() => void} [onBytes] */
async function* eventsOf(answer, onBytes) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (answer.body).getReader();
  const decoder = new TextDecoder();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read().catch(() => {
      throw new ApiError(0, { what: 'the answer was cut off', fix: 'try again' });
    });
    if (done) return;
    onBytes?.();
    rest += decoder.decode(value, { stream: true });
    const blocks = rest.split(/\r?\n\r?\n/);
    rest = blocks.pop() ?? '';
    for (const block of blocks) {
      const event = { id: '', name: 'message', data: '' };
      for (const line of block.split(/\r?\n/)) {
        const [, field, text] = /^(\w+): ?(.*)$/s.exec(line) ?? [];
        if (field === 'id') event.id = text;
        else if (field === 'event') event.name = text;
        else if (field === 'data') event.data += (event.data && '\n') + text;
      }
      if (event.data || event.id) yield event;
    }
  }
}

/** Send JSON and yield what is streamed back; an error among it is thrown.
 * @param {string} path @param {unknown} body @param {AbortSignal} signal */
export async function* streamed(path, body, signal) {
  const headers = { 'Content-Type': 'application/json' };
  const answer = await open(path, { method: 'POST', headers, body: JSON.stringify(body), signal });
  for await (const { name, data: text } of eventsOf(answer)) {
    const data = text ? JSON.parse(text) : null;
    if (name === 'error') throw new ApiError(400, data.error);
    yield { name, data };
  }
}

/** Send JSON, and return the result after the progress.
 * @param {string} path @param {unknown} body @param {(progress: any) => void} onProgress @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function work(path, body, onProgress, signal = new AbortController().signal) {
  let result = null;
  for await (const { name, data } of streamed(path, body, signal)) {
    if (name === 'progress') onProgress(data);
    else if (name === 'result') result = data;
  }
  return result;
}

/** Take one of the connections for streams; null if other tabs hold all of them. @returns {Promise<(() => void) | null>} */
async function takeStream() {
  if (!navigator.locks) return () => {};
  for (let slot = 0; slot < NUM_STREAMS; slot++) {
    const release = await new Promise((resolve) => {
      navigator.locks.request(`tunewell-stream-${slot}`, { ifAvailable: true }, (lock) => {
        if (!lock) return resolve(null);
        return new Promise((free) => resolve(() => free(null)));
      });
    });
    if (release) return release;
  }
  return null;
}

/** Follow a log: it goes on after the last event if the connection is cut, and is closed while the tab is hidden.
 * @param {string} path
 * @param {(event: { id: string, name: string, data: any }) => void} onEvent
 * @param {{ from?: string, onState?: (state: 'open' | 'cut' | 'closed', error?: ApiError) => void }} [options]
 * @returns {() => void} a function that ends it */
export function follow(path, onEvent, { from = '', onState = () => {} } = {}) {
  let last = from;
  let isOver = false;
  let isRunning = false;
  let attempt = 0;
  let controller = new AbortController();
  let retry = 0;

  const connect = async () => {
    const own = (controller = new AbortController());
    const release = await takeStream();
    let quiet = 0;
    // A dead connection, as of a laptop that slept, reports no end: without a sign of life it is opened again.
    const alive = () => {
      clearTimeout(quiet);
      quiet = setTimeout(() => own.abort(), 1000 * (release ? QUIET_SECONDS : CAUGHT_UP_SECONDS));
    };
    try {
      const headers = new Headers({ Accept: 'text/event-stream' });
      if (last) headers.set('Last-Event-ID', last);
      const answer = await open(path, { signal: own.signal, headers });
      onState('open');
      attempt = 0;
      alive();
      for await (const event of eventsOf(answer, alive)) {
        if (isOver) return;
        if (event.data) onEvent({ ...event, data: JSON.parse(event.data) });
        if (event.id) last = event.id;
      }
      onState('cut');
    } catch (error) {
      if (error instanceof ApiError && error.status >= 400 && error.status < 500) {
        isOver = true;
        onState('closed', error);
      } else if (!isOver && !document.hidden && !own.signal.aborted) onState('cut');
    } finally {
      clearTimeout(quiet);
      release?.();
    }
    return release ? RETRY_SECONDS[Math.min(attempt++, RETRY_SECONDS.length - 1)] : ASK_SECONDS;
  };
  const run = async () => {
    if (isRunning) return;
    isRunning = true;
    while (!isOver && !document.hidden) {
      const seconds = await connect();
      await new Promise((go) => (retry = setTimeout(go, 1000 * (seconds ?? 0))));
    }
    isRunning = false;
  };
  const onVisibility = () => (document.hidden ? controller.abort() : run());
  const close = () => controller.abort();
  document.addEventListener('visibilitychange', onVisibility);
  addEventListener('pagehide', close);
  run();
  return () => {
    isOver = true;
    clearTimeout(retry);
    controller.abort();
    document.removeEventListener('visibilitychange', onVisibility);
    removeEventListener('pagehide', close);
  };
}
