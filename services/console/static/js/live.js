// Live updates of one page over server-sent events. A hidden page reads nothing.

import { text } from "./dom.js";

const shown = document.getElementById("link");

function show(state, words) {
  shown.dataset.state = state;
  text(shown, words);
}

export function live(topics, handlers, onDenied) {
  let source = null;
  let closed = false;

  function open() {
    if (closed || source || document.hidden) return;
    source = new EventSource(`/api/events?topics=${topics.join(",")}`);
    source.onopen = () => show("live", "live");
    source.onerror = () => {
      show("away", "no connection");
      if (source && source.readyState === EventSource.CLOSED) {
        source = null;
        onDenied();
        setTimeout(open, 3000);
      }
    };
    for (const topic of topics) {
      source.addEventListener(topic, (event) => {
        const data = JSON.parse(event.data);
        show(data.error ? "waiting" : "live", data.error ? "services do not answer" : "live");
        handlers[topic](data);
      });
    }
  }

  function close() {
    if (source) source.close();
    source = null;
  }

  function visibility() {
    if (document.hidden) {
      close();
      show("waiting", "paused");
    } else open();
  }

  document.addEventListener("visibilitychange", visibility);
  shown.hidden = false;
  show("waiting", "connecting");
  open();
  return () => {
    closed = true;
    shown.hidden = true;
    document.removeEventListener("visibilitychange", visibility);
    close();
  };
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function post(path, content) {
  const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, body.error || `status ${response.status}`);
  return body;
}

export async function get(path, signal) {
  const response = await fetch(path, { signal, headers: { Accept: "application/json" } });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, body.error || `status ${response.status}`);
  return body;
}
