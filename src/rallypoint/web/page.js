"use strict";
// Shows what the agent tells of its job, once a second. All that comes from outside is put in as text, never as markup, and only
// what has changed is touched: a job may have a thousand workers.
{
  const KEPT = "rallypoint-token";
  const RETRY_MS = 2000;
  const FOLLOW_MS = 2000;
  const ROWS = 64; // of one table
  const MANY_TABLES = 24;
  const STRANGE = new Set(["stopped", "traced", "ended", "gone"]);
  const PHASES = ["running", "starting", "waiting", "stopping", "lost", "done"];
  const byId = (id) => document.getElementById(id);

  // --- small things --------------------------------------------------------------------------------------------------------

  function takeToken() {
    const given = new URLSearchParams(location.search).get("token");
    if (given) sessionStorage.setItem(KEPT, given);
    history.replaceState(null, "", "/");
    return given;
  }

  function setText(element, text) {
    const node = element.firstChild;
    if (node === null) {
      if (text !== "") element.append(document.createTextNode(text));
    } else if (node.data !== text) {
      node.data = text;
    }
  }

  function setClass(element, name) {
    if (element.className !== name) element.className = name;
  }

  function make(name, text = "", attributes = {}) {
    const element = document.createElement(name);
    if (text !== "") element.append(document.createTextNode(text));
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  }

  // As many children as there are things, each made once and shown anew.
  function setList(parent, things, create, show) {
    while (parent.childElementCount > things.length) parent.lastElementChild.remove();
    while (parent.childElementCount < things.length) parent.append(create());
    things.forEach((thing, index) => show(parent.children[index], thing));
  }

  function duration(seconds) {
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return s % 60 && s < 600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 60)} min`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
  }

  const exact = (seconds) => (seconds < 10 ? `${seconds.toFixed(2)} s` : duration(seconds));

  function size(bytes) {
    let value = bytes;
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (value < 1024) return `${value >= 100 || unit === "B" ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
      value /= 1024;
    }
    return `${value.toFixed(1)} TiB`;
  }

  const share = (part) => `${(100 * part).toFixed(1)} %`;
  const speed = (rate) => (rate >= 100 ? rate.toFixed(0) : rate >= 1 ? rate.toFixed(1) : rate.toFixed(2));
  const many = (count, one) => `${count} ${one}${count === 1 ? "" : "s"}`;

  function ranges(numbers) {
    const parts = [];
    for (const number of numbers) {
      const last = parts[parts.length - 1];
      if (last && last[1] === number - 1) last[1] = number;
      else parts.push([number, number]);
    }
    return parts.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
  }

  // --- the view ------------------------------------------------------------------------------------------------------------

  let announced = "";
  let view = null;

  function announce(text) {
    if (text !== announced) setText(byId("announced"), (announced = text));
  }

  function show(now) {
    view = now;
    document.title = `${view.phase}: ${view.job}`;
    setText(byId("job"), view.job);
    setText(byId("command"), view.command);
    announce(`The job is ${view.phase}${view.generation ? `, generation ${view.generation}` : ""}`);
    showSummary();
    showNotices();
    showTimeline();
    showWorkers();
    showRestarts();
    showLogRanks(view.nodes.flatMap((node) => node.workers.map((worker) => worker[0])));
  }

  // A rank that is there no more stays chosen as long as its log is shown.
  function showLogRanks(ranks) {
    const chosen = byId("log-rank").value;
    const all = chosen === "" || byId("log").hidden || ranks.includes(Number(chosen)) ? ranks : [...ranks, Number(chosen)];
    setList(byId("log-rank"), all, () => make("option"), (option, rank) => setText(option, `${rank}`));
    if (all !== ranks) byId("log-rank").value = chosen;
  }

  function showSummary() {
    const facts = [
      ["Phase", view.phase],
      ["Step", view.step ?? "–"],
      ["Steps/s", view.rate === null ? "–" : speed(view.rate)],
      ["Goodput", view.goodput === null ? "–" : share(view.goodput)],
      ["Nodes", `${view.node_count}`],
      ["Workers", `${view.world_size ?? "–"}`],
      ["Generation", view.generation || "–"],
      ["Restarts", `${view.restarts} of ${view.max_restarts}`],
      ["Up for", duration(view.uptime_s)],
    ];
    const create = () => {
      const group = make("div");
      group.append(make("dt"), make("dd"));
      return group;
    };
    setList(byId("summary"), facts, create, (group, [name, value]) => {
      setText(group.firstElementChild, name);
      setText(group.lastElementChild, `${value}`);
    });
  }

  function showNotices(trouble = "") {
    const notices = trouble ? [trouble] : [];
    if (view && view.note) notices.push(view.note);
    if (view && view.silent_count) notices.push(`No answer from ${many(view.silent_count, "node")}: ${view.silent.join(", ")}`);
    if (view && view.behind.length) notices.push(`Behind the others: rank ${ranges(view.behind)}`);
    setList(byId("notices"), notices, () => make("li"), setText);
  }

  function showTimeline() {
    const parts = [];
    for (const span of view.timeline) {
      const kept = span.kept_s ?? span.lasted_s;
      const about = `${span.phase}, ${duration(span.lasted_s)}, ${duration(span.ago_s)} ago`;
      const known = span.phase === "running" ? `generation ${span.generation}: ${about}` : about;
      if (kept > 0) parts.push([span.phase, kept, known]);
      if (span.lasted_s > kept) parts.push(["lost", span.lasted_s - kept, `${known}; ${duration(span.lasted_s - kept)} of it lost`]);
    }
    setList(byId("timeline"), parts, () => make("span"), (segment, [phase, seconds, about]) => {
      setClass(segment, phase);
      const grow = `${Math.max(seconds, 0.001)}`;
      if (segment.style.flexGrow !== grow) segment.style.flexGrow = grow;
      if (segment.title !== about) segment.title = about;
    });
    const told = view.timeline.map((span) => [span.lasted_s, span.phase === "running" ? aboutGeneration(span) : ""]);
    setList(byId("generations"), told, () => make("span"), (label, [seconds, text]) => {
      const grow = `${Math.max(seconds, 0.001)}`;
      if (label.style.flexGrow !== grow) label.style.flexGrow = grow;
      setText(label, text);
    });
    const first = view.timeline[0];
    setText(byId("timeline-of"), `of this node, ${view.own}`);
    setText(byId("timeline-from"), first ? `${duration(first.ago_s)} ago` : "");
    const total = Object.values(view.seconds).reduce((sum, one) => sum + one, 0);
    const spent = PHASES.filter((phase) => view.seconds[phase] > 0).map((phase) => [phase, view.seconds[phase]]);
    const words = spent.map(([phase, seconds]) => [phase, `${phase} ${duration(seconds)} (${share(seconds / total)})`]);
    const create = () => {
      const item = make("li");
      item.append(make("i", "", { "aria-hidden": "true" }), make("span"));
      return item;
    };
    setList(byId("legend"), words, create, (item, [phase, text]) => {
      setClass(item.firstElementChild, phase);
      setText(item.lastElementChild, text);
    });
    byId("timeline").setAttribute("aria-label", `The phases of this node: ${words.map(([, text]) => text).join(", ")}`);
    if (document.querySelector("details").open) showPhases();
  }

  function aboutGeneration(span) {
    const kept = span.kept_s === null || span.lasted_s <= 0 ? 1 : span.kept_s / span.lasted_s;
    return kept === 1 ? `gen. ${span.generation}` : `gen. ${span.generation}: ${share(kept)} kept`;
  }

  function showPhases() {
    const create = () => {
      const row = make("tr");
      row.append(make("th", "", { scope: "row" }), make("td"), make("td"), make("td"), make("td"));
      return row;
    };
    setList(byId("phases"), [...view.timeline].reverse(), create, (row, span) => {
      const lost = span.kept_s === null ? 0 : span.lasted_s - span.kept_s;
      const cells = [
        span.phase, span.generation || "–", `${duration(span.ago_s)} ago`, exact(span.lasted_s), lost > 0 ? exact(lost) : "–",
      ];
      cells.forEach((text, index) => setText(row.children[index], `${text}`));
    });
  }

  // --- nodes and workers ---------------------------------------------------------------------------------------------------

  // Each node has a table of its own, or several. Of many, those out of sight are not even laid out (content-visibility in the
  // style); of a few all are, for whoever prints the page or makes a picture of it as a whole.
  const nodes = byId("node-tables");
  const heads = byId("heads");
  const shownNodes = new Map();

  function makeNode() {
    const table = make("table", "", { class: "workers" });
    const caption = make("caption");
    const words = make("div");
    words.append(make("b"), make("span"));
    caption.append(words);
    const head = heads.tHead.cloneNode(true);
    head.className = "unseen-head";
    const body = make("tbody");
    table.append(caption, heads.querySelector("colgroup").cloneNode(true), head, body);
    const block = make("div", "", { class: "node" });
    block.append(table);
    return { block, body, name: words.firstElementChild, about: words.lastElementChild, rows: [] };
  }

  function makeWorker() {
    const row = make("tr");
    const cells = [make("th", "–", { scope: "row" })];
    for (let index = 0; index < 7; index++) cells.push(make("td", "–"));
    row.append(...cells);
    return { row, texts: cells.map((cell) => cell.firstChild), shown: cells.map(() => "–"), kind: "" };
  }

  function showWorkers() {
    const behind = new Set(view.behind);
    let left = 0;
    const blocks = view.nodes.flatMap(blocksOf);
    nodes.classList.toggle("many", blocks.length > MANY_TABLES);
    const keys = new Set(blocks.map((block) => block.key));
    for (const [key, shown] of shownNodes) {
      if (!keys.has(key)) {
        shown.block.remove();
        shownNodes.delete(key);
      }
    }
    blocks.forEach(({ key, node, workers, isFirst }, index) => {
      if (!shownNodes.has(key)) shownNodes.set(key, makeNode());
      const shown = shownNodes.get(key);
      if (nodes.children[index] !== shown.block) nodes.insertBefore(shown.block, nodes.children[index] ?? null);
      setText(shown.name, node.node);
      setText(shown.about, isFirst ? aboutNode(node) : "continued");
      showRows(shown, workers, behind);
      const isUsual = node.phase === view.phase && shown.rows.every((row) => row.kind === "usual");
      setClass(shown.block, isUsual ? "node usual" : "node");
      if (isFirst) left += node.count - node.workers.length;
    });
    const more = view.node_count - view.nodes.length;
    setText(byId("left-out"), left || more ? `Not shown: ${many(left, "worker")} more, ${many(more, "node")} more` : "");
  }

  function blocksOf(node) {
    const blocks = [];
    for (let first = 0; first === 0 || first < node.workers.length; first += ROWS) {
      const workers = node.workers.slice(first, first + ROWS);
      blocks.push({ key: `${node.key} ${first}`, node, workers, isFirst: first === 0 });
    }
    return blocks;
  }

  function aboutNode(node) {
    const rank = node.is_spare ? "spare" : node.rank === null ? "no rank yet" : `node ${node.rank}`;
    const where = node.hostname === node.node ? "" : ` on ${node.hostname}`;
    const why = node.why && node.phase !== "running" ? `: ${node.why}` : "";
    const logs = node.log_dir ? ` · logs in ${node.log_dir}` : "";
    return `${rank}${where}, pid ${node.pid} · ${node.phase} for ${duration(node.phase_s)}${why}${logs}`;
  }

  function showRows(shown, workers, behind) {
    while (shown.rows.length > workers.length) shown.rows.pop().row.remove();
    workers.forEach((worker, index) => {
      if (index === shown.rows.length) {
        const made = makeWorker();
        shown.rows.push(made);
        shown.body.append(made.row);
      }
      showWorker(shown.rows[index], worker, behind.has(worker[0]));
    });
  }

  function showWorker(shown, [rank, pid, state, doing, step, rate, silent, cpu, memory], isBehind) {
    const told = doing && doing !== "running" ? `${state} (${doing})` : state;
    const texts = [
      `${rank}`,
      isBehind ? `${told}, behind` : told,
      step === null ? "–" : `${step}`,
      rate === null ? "–" : speed(rate),
      silent === null ? "–" : `${duration(silent)} ago`,
      cpu === null ? "–" : `${Math.round(100 * cpu)} %`,
      memory === null ? "–" : size(memory),
      `${pid}`,
    ];
    for (let index = 0; index < texts.length; index++) {
      if (shown.shown[index] !== texts[index]) shown.texts[index].data = shown.shown[index] = texts[index];
    }
    const kind = isBehind || STRANGE.has(state) ? "unusual" : "usual";
    if (shown.kind !== kind) shown.row.className = shown.kind = kind;
  }

  function showRestarts() {
    const counted = `On the nodes that are here, ${many(view.failed_workers, "worker")} failed and ${view.hung_workers} hung so far.`;
    setText(byId("failures"), view.lost_s > 0 ? `${counted} ${duration(view.lost_s)} of work had to be done again.` : counted);
    const create = () => {
      const item = make("li");
      item.append(make("time"), make("span"));
      return item;
    };
    setList(byId("restarts"), [...view.history].reverse(), create, (item, [ago, , why]) => {
      setText(item.firstElementChild, `${duration(ago)} ago: `);
      setText(item.lastElementChild, why);
    });
  }

  // --- asking --------------------------------------------------------------------------------------------------------------

  const token = takeToken();
  const ask = (path, options = {}) =>
    fetch(path, { cache: "no-store", credentials: "omit", headers: { Authorization: `Bearer ${token}` }, ...options });

  let stream = null; // while this tab is looked at
  let heardAt = null;
  let hasEnded = false;

  function showConnection(state, text) {
    byId("connection").dataset.state = state;
    setText(byId("connection"), text);
  }

  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
      text += value;
      if (!value.includes("\n")) continue;
      const whole = text.split("\n\n");
      text = whole.pop();
      yield* whole;
    }
  }

  async function watch(mine) {
    while (stream === mine) {
      try {
        const response = await ask("/web/view", { signal: mine.signal });
        if (response.status === 401) {
          showConnection("lost", "the token is no longer valid");
          return;
        }
        if (!response.ok) throw new Error((await response.text()).trim());
        for await (const event of events(response.body)) hear(event);
        if (hasEnded) return;
        throw new Error("the connection ended");
      } catch (error) {
        if (stream !== mine) return;
        const since = heardAt === null ? "" : ` since ${heardAt.toLocaleTimeString()}`;
        showConnection("lost", `no answer${since}: the job has ended, or cannot be reached`);
        announce("The connection to the job is lost");
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  }

  function hear(event) {
    const [name, data] = event.split("\ndata: ");
    const told = JSON.parse(data);
    heardAt = new Date();
    showConnection("live", "live");
    if (name === "event: view") show(told);
    else if (name === "event: end") showEnd(told.why);
    else showNotices(`This agent could not describe its job: ${told.error}`);
  }

  function showEnd(why) {
    hasEnded = true;
    showConnection("ended", `ended at ${heardAt.toLocaleTimeString()}`);
    announce("The job has ended on this node");
    showNotices(`This node is done${why ? `: ${why}` : ""}`);
  }

  // A tab that nobody sees asks for nothing.
  function lookOrNot() {
    if (document.hidden) {
      const ended = stream;
      stream = null;
      if (ended) ended.abort();
    } else if (stream === null && !hasEnded) {
      stream = new AbortController();
      watch(stream);
    }
  }

  async function askOnce(button, path, options, showFound) {
    if (button.disabled) return;
    button.disabled = true;
    try {
      const response = await ask(path, options);
      showFound(response.ok ? await response.json() : { error: (await response.text()).trim() });
    } catch (error) {
      showFound({ error: "no answer: the job has ended, or cannot be reached" });
    } finally {
      button.disabled = false;
    }
  }

  function showBlock(block, text) {
    setText(byId(`${block.id}-at`), `at ${new Date().toLocaleTimeString()}`);
    const isAtEnd = block.hidden || block.scrollTop + block.clientHeight >= block.scrollHeight - 8;
    block.hidden = false;
    setText(block, text || "(nothing)");
    if (isAtEnd && block.id === "log") block.scrollTop = block.scrollHeight;
  }

  function showStacks(found) {
    showBlock(byId("stacks"), found.error ?? found.lines.join("\n").trim());
  }

  function showLog(found) {
    if (found.error !== undefined) {
      setText(byId("log-path"), found.error);
      byId("log").hidden = true;
      return;
    }
    const part = found.is_cut ? "the end of " : "";
    setText(byId("log-path"), `${part}${found.path}, ${size(found.size)}`);
    showBlock(byId("log"), found.text);
  }

  function askLog() {
    const rank = byId("log-rank").value;
    if (rank !== "") askOnce(byId("ask-log"), `/web/log?rank=${rank}&stream=${byId("log-stream").value}`, {}, showLog);
  }

  byId("ask-stacks").addEventListener("click", () => askOnce(byId("ask-stacks"), "/web/stacks", { method: "POST" }, showStacks));
  byId("ask-log").addEventListener("click", askLog);
  byId("log-rank").addEventListener("change", askLog);
  byId("log-stream").addEventListener("change", askLog);
  byId("unusual").addEventListener("change", (event) => nodes.classList.toggle("only-unusual", event.target.checked));
  document.querySelector("details").addEventListener("toggle", () => view && showPhases());
  setInterval(() => byId("follow-log").checked && !document.hidden && askLog(), FOLLOW_MS);
  document.addEventListener("visibilitychange", lookOrNot);
  lookOrNot();
}
