// Asks the learner for its state every other second and shows it. Texts from outside become text nodes, never markup.
const INTERVAL_MS = 2000;
const PLOTS = [
  ["Reward", "reward", [["reward/mean", "trained", "--accent"], ["eval/reward", "held out", "--warn"]]],
  ["Policy lag", "optimizer steps", [["lag/max", "largest", "--muted"], ["lag/mean", "mean", "--accent"], ["staleness/bound", "bound", "--warn"]]],
  ["Clipped", "share", [["clip/fraction", "clipped", "--accent"]]],
  ["Spread of the log ratio", "nats", [["ratio/log_std", "standard deviation", "--accent"]]],
  ["Entropy", "nats", [["entropy/mean", "next token", "--accent"]]],
  ["Length", "tokens", [["length/mean", "mean", "--accent"]]],
  ["Gradient norm", "", [["loss/grad_norm", "norm", "--accent"]]],
  ["Seconds of a step", "s", [["time/step_s", "whole step", "--accent"], ["time/wait_rollouts_s", "waits for rollouts", "--warn"]]],
];

const at = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shown = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function tile(label, value) {
  const box = element("div", "", "figure");
  box.append(element("div", label, "label"), element("div", value, "value"));
  return box;
}

function duration(seconds) {
  const whole = Math.round(seconds);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return parts.map((part, index) => (index ? String(part).padStart(2, "0") : part)).join(":");
}

function makePlots() {
  for (const [title] of PLOTS) {
    const card = element("div", "", "card");
    card.append(element("h3", title), element("div", "", "plot"));
    at("plots").append(card);
  }
}

function drawPlots(curves) {
  const boxes = document.querySelectorAll(".plot");
  PLOTS.forEach(([, unit, lines], index) => {
    const traces = lines
      .filter(([metric]) => metric in curves)
      .map(([metric, name, tone]) => ({
        x: curves[metric].xs,
        y: curves[metric].ys,
        name,
        mode: curves[metric].xs.length > 12 ? "lines" : "lines+markers",
        line: { color: color(tone), width: 2 },
      }));
    const axis = { gridcolor: color("--line"), linecolor: color("--line"), zeroline: false, automargin: true, tickfont: { color: color("--muted") } };
    const layout = {
      margin: { l: 44, r: 10, t: 8, b: 30 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("--ink"), size: 12 },
      showlegend: traces.length > 1,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      hovermode: "x unified",
      xaxis: { ...axis, showgrid: false },
      yaxis: { ...axis, title: { text: unit, font: { color: color("--muted") } } },
    };
    Plotly.react(boxes[index], traces, layout, { displayModeBar: false, responsive: true });
  });
}

function showMembers(members, version) {
  at("members").replaceChildren(
    ...members.map((member) => {
      const row = document.createElement("tr");
      const lag = member.policy_version < 0 ? "–" : `${member.policy_version} (lag ${Math.max(0, version - member.policy_version)})`;
      const numbers = [lag, `${member.num_leases}/${member.capacity}`, shown(member.tokens_per_s, 0), `${shown(member.last_seen_s, 1)} s`];
      row.append(element("td", member.name), element("td", member.state), ...numbers.map((text) => element("td", text, "number")), element("td", member.engine));
      return row;
    }),
  );
}

function showSamples(samples) {
  at("samples").replaceChildren(
    ...samples.map((sample) => {
      const card = element("div", "", "card sample");
      const facts = `step ${sample.policy_version}, reward ${shown(sample.reward, 3)}, lag ${sample.policy_lag}, ${sample.num_tokens} tokens, ended by ${sample.finish_reason}`;
      card.append(element("div", facts, "facts"), element("pre", sample.prompt, "prompt"), element("pre", sample.completion));
      return card;
    }),
  );
}

function showEvents(events) {
  at("events").replaceChildren(
    ...events.map((event) => {
      const row = document.createElement("tr");
      const time = new Date(event.time * 1000).toLocaleTimeString();
      row.append(...[time, event.event, event.actor || "", event.detail].map((text) => element("td", text)));
      return row;
    }),
  );
}

function show(state) {
  const { status } = state;
  document.title = `${status.policy_version}/${status.num_steps} ${state.name} · offbeat`;
  at("name").textContent = state.name;
  at("doing").textContent = `${status.doing} for ${shown(status.doing_s, 1)} s`;
  at("waiting").textContent = status.waiting_for ? `The next batch waits for: ${status.waiting_for}` : "";
  at("progress").value = status.policy_version / status.num_steps;
  at("problems").replaceChildren(...[...status.vitals.health, ...status.problems].map((text) => element("li", text)));
  const left = status.vitals.step_s === null ? "–" : duration(status.vitals.step_s * (status.num_steps - status.policy_version));
  at("figures").replaceChildren(
    tile("Step", `${status.policy_version} of ${status.num_steps}`),
    tile("Reward", shown(status.vitals.reward, 3)),
    tile("Lag", shown(status.vitals.lag_mean, 1)),
    tile("Seconds a step", shown(status.vitals.step_s, 2)),
    tile("Left", left),
    tile("Groups ready", String(status.num_ready)),
    tile("Generating", String(status.num_generating)),
    tile("Epoch", (status.epoch + status.epoch_position).toFixed(2)),
  );
  at("ledger").replaceChildren(...Object.entries(status.ledger).map(([name, number]) => tile(name, number.toLocaleString())));
  showMembers(status.members, status.policy_version);
  showSamples(state.samples);
  showEvents(state.events);
  drawPlots(state.curves);
}

function tell(text, tone) {
  at("link").textContent = text;
  at("link").className = `pill ${tone}`;
}

async function ask() {
  try {
    const answer = await fetch("state.json");
    if (!answer.ok) throw new Error(answer.statusText);
    show(await answer.json());
    tell("live", "good");
  } catch {
    tell("the learner does not answer", "bad");
  }
  setTimeout(ask, INTERVAL_MS);
}

makePlots();
ask();
