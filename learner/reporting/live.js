// Asks the learner for its state every other second and shows it, and the newest report beneath. Texts of the state become text
// nodes, never markup; those of the report were escaped by its templates, and the server's policy lets no script in it run.
const INTERVAL_MS = 2000;
let shownReport = 0;

const at = (id) => document.getElementById(id);
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

// As common/formats.py says it.
function duration(seconds) {
  const two = (number) => String(number).padStart(2, "0");
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  const hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${two(minutes % 60)} min` : `${minutes} min ${two(Math.round(seconds) % 60)} s`;
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

// Replaces the report and keeps what its reader has open; a figure is drawn again in its place, where the mouse may be.
function showReport(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").body;
  const titles = (root, selector) => new Map([...root.querySelectorAll(selector)].map((part) => [part.textContent, part.parentElement]));
  const drawn = titles(at("report"), "figure > h3");
  for (const [title, figure] of titles(fresh, "figure > h3")) {
    const place = figure.querySelector(".plot");
    const old = place && drawn.get(title)?.querySelector(".plot");
    if (!old) continue;
    old.style.height = place.style.height;
    place.replaceWith(old);
  }
  const folded = titles(at("report"), "details > summary");
  for (const [summary, details] of titles(fresh, "details > summary")) if (folded.has(summary)) details.open = folded.get(summary).open;
  at("report").replaceChildren(...fresh.childNodes);
  drawFigures();
}

async function askForReport(number) {
  const answer = await fetch("report.html");
  if (!answer.ok) return;
  showReport(await answer.text());
  shownReport = number;
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
}

function tell(text, tone) {
  at("link").textContent = text;
  at("link").className = `pill ${tone}`;
}

async function ask() {
  try {
    const answer = await fetch("state.json");
    if (!answer.ok) throw new Error(answer.statusText);
    const state = await answer.json();
    show(state);
    tell("live", "good");
    if (state.report !== shownReport) await askForReport(state.report);
  } catch {
    tell("the learner does not answer", "bad");
  }
  setTimeout(ask, INTERVAL_MS);
}

ask();
