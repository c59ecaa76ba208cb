// Services: who is registered and healthy, with versions, engines, GPUs, queues and pool shards.

import { confirm } from "./dialog.js";
import { fill, h, text } from "./dom.js";
import { bytes, count, number } from "./format.js";
import { live } from "./live.js";

const ORDER = ["scheduler", "pool", "trainer", "router", "prefill", "decode", "gateway", "runner", "console"];
const KNOWN = { ready: "good", standby: "warn", "not serving": "bad", "no answer": "bad" };

export function show(root, context) {
  const sub = h("span", { class: "sub" }, "asking every service");
  const notes = h("div", { class: "notes", hidden: true });
  const groups = h("div", { class: "kinds" });
  const shards = h("section", { class: "panel scroll", tabindex: "0", role: "region", "aria-label": "Pool shards", hidden: true });
  const queue = h("dl", { class: "tiles" });
  const actions = h("div", { class: "open" });
  fill(root, h("div", { class: "head" }, h("h1", {}, "Services"), sub, actions), notes, queue, groups, shards);

  function drain(one, draining) {
    confirm({
      title: draining ? `Drain ${one.instance}?` : `Resume ${one.instance}?`,
      body: h("p", {}, draining ? `It gets no new ${one.kind === "runner" ? "rollouts" : "requests"}; what runs there ends there. A restart of the process ends the drain.` : "It gets new work again."),
      action: draining ? "Drain" : "Resume",
      path: one.kind === "runner" ? "/api/runners/drain" : "/api/services/drain",
      content: () => (one.kind === "runner" ? { instance: one.instance, draining } : { kind: one.kind, instance: one.instance, draining }),
    });
  }

  function setActivity(activity, title, words) {
    confirm({ title, body: h("p", {}, words), action: title.split(" ")[0], path: "/api/queue/activity", content: () => ({ activity }) });
  }

  let activity = "";
  function drawActions(now) {
    if (!context.maySteer || now === activity) return;
    activity = now;
    fill(actions, now === "running" ? [
      h("button", { type: "button", onclick: () => setActivity("draining", "Drain the queue?", "No further group starts. Running groups end, and complete groups are trained.") }, "Drain the queue"),
      h("button", { type: "button", onclick: () => setActivity("paused", "Pause the queue?", "No further rollout and no further batch is leased. Leased ones continue to their end.") }, "Pause the queue"),
    ] : [h("button", { class: "primary", type: "button", onclick: () => setActivity("running", "Resume the queue?", "Rollouts and batches are leased again.") }, "Resume the queue")]);
  }

  function card(one) {
    const draining = one.metadata.draining === "1";
    const drained = ["prefill", "decode", "runner"].includes(one.kind.split("@")[0]);
    const facts = [
      ["Address", one.address],
      one.metadata.http && ["HTTP", one.metadata.http],
      one.weight_version !== undefined && ["Weights", `v${one.weight_version}`],
      one.running !== undefined && ["Load", `${one.running} running, ${one.queued} queued`],
      one.cached_share !== null && one.cached_share !== undefined && ["Prompt tokens cached", `${number(100 * one.cached_share, 0)} %`],
      one.version && ["Release", one.version],
    ].filter(Boolean);
    const rest = Object.entries(one.metadata).filter(([name]) => !["http", "metrics", "draining"].includes(name));
    return h(
      "article",
      { class: "panel service" },
      h("div", { class: "head" }, h("h3", { class: "mono" }, one.instance), h("span", { class: `badge ${draining ? "warn" : KNOWN[one.state] || ""}` }, draining ? "draining" : one.role && one.state === "ready" ? one.role : one.state)),
      one.error ? h("p", { class: "note bad small" }, one.error) : null,
      h("dl", { class: "facts small" }, facts.flatMap(([label, value]) => [h("dt", {}, label), h("dd", {}, value)])),
      one.gpus.map((gpu) => h("p", { class: "small gpu" }, `GPU ${gpu}`)),
      context.maySteer && drained ? h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => drain(one, !draining) }, draining ? "Resume" : "Drain", h("span", { class: "unseen" }, ` ${one.instance}`))) : null,
      rest.length ? h("details", { class: "small" }, h("summary", {}, "Metadata"), h("dl", { class: "facts" }, rest.flatMap(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]))) : null,
    );
  }

  // An open list of metadata stays open over an update.
  let last = "";
  function draw(state) {
    const key = JSON.stringify([state.services, state.missing]);
    if (key === last) return;
    last = key;
    const open = new Set([...groups.querySelectorAll("details[open]")].map((one) => one.closest("article").querySelector("h3").textContent));
    const kinds = [...new Set([...ORDER, ...state.services.map((one) => one.kind)])].filter((kind) => state.services.some((one) => one.kind === kind) || state.missing.includes(kind));
    fill(groups, kinds.map((kind) => {
      const members = state.services.filter((one) => one.kind === kind);
      return h("section", { class: members.length > 2 ? "many" : null }, h("h2", {}, kind, h("span", { class: "muted" }, ` ${members.length || "none registered"}`)), h("div", { class: "cards" }, members.map(card)));
    }));
    for (const article of groups.querySelectorAll("article")) {
      const details = article.querySelector("details");
      if (details && open.has(article.querySelector("h3").textContent)) details.open = true;
    }
  }

  const close = live(["services", "overview"], {
    services(event) {
      const state = event.state;
      const problems = [...(event.error ? [event.error] : []), ...(state?.problems || [])];
      notes.hidden = !problems.length;
      fill(notes, problems.map((one) => h("p", { class: "note" }, one)));
      if (!state) return;
      const healthy = state.services.filter((one) => ["ready", "standby"].includes(one.state)).length;
      text(sub, `${healthy} of ${count(state.services.length, "process", "processes")} healthy`);
      draw(state);
      shards.hidden = !state.shards.length;
      fill(shards, h("table", { class: "rows" }, h("caption", {}, "Pool shards"), h("thead", {}, h("tr", {}, ["Shard", "Copies in sync", "Groups", "Trajectories", "Turns", "In use", "File", "Free on the disk"].map((one, index) => h("th", { scope: "col", class: index ? "num" : null }, one)))), h("tbody", {}, state.shards.map((one) => h("tr", {}, h("td", { class: "mono" }, one.shard), [one.copies || "–", number(one.groups), number(one.trajectories), number(one.turns), bytes(one.live_bytes), bytes(one.used_bytes), bytes(one.disk_free_bytes)].map((value) => h("td", { class: "num" }, value)))))));
    },
    overview(event) {
      const scheduler = event.state?.scheduler;
      const inference = event.state?.inference;
      if (scheduler) drawActions(scheduler.activity);
      const tiles = [
        scheduler && ["Queue", scheduler.activity, `${scheduler.mode}, admission ${scheduler.admission}`],
        scheduler && ["Groups", `${scheduler.running_groups} / ${scheduler.running_limit}`, `run; ${number(scheduler.queued)} queued`],
        scheduler && ["Rollouts", number(scheduler.running_rollouts), `run; ${number(scheduler.retries)} repeated, ${number(scheduler.faults)} faults`],
        inference && ["Sampling", number(inference.running), `requests run; ${number(inference.queued)} queued`],
        inference && ["Weights", `v${inference.weight_version}`, `served by all ${count(inference.workers, "worker")}`],
      ].filter(Boolean);
      fill(queue, tiles.map(([label, value, hint]) => h("div", { class: "tile" }, h("dt", {}, label), h("dd", {}, value), h("dd", { class: "hint" }, hint))));
    },
  }, context.denied);
  return close;
}
