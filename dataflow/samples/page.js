"use strict"
// Sorts, filters and searches the samples of a page; a filter is written as the command's where=, see query.py.

const CONDITION = /\s*([^\s<>=!~"']+)\s*(<=|>=|!=|==|=|<|>|~)\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s"']+)(\s+and\s+|\s*$)/giy
const ALIASES = { latency: "latency_s", reward: "score", version: "weights_version" }
const ORDERS = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b }
const [search, where, sort, falling, count, missing] =
  ["search", "where", "sort", "falling", "count", "missing"].map((name) => document.getElementById(name))

function valueOf(cell) {
  if (cell.dataset.value !== undefined) return cell.dataset.value === "" ? null : Number(cell.dataset.value)
  if (cell.tagName !== "TD" || cell.querySelector("pre")) return cell.textContent
  return /^-?\d+$/.test(cell.textContent) ? Number(cell.textContent) : cell.textContent
}

const named = (place) => [...place.querySelectorAll("[data-name]:not(th)")].map((e) => [e.dataset.name, valueOf(e)])
const groups = [...document.querySelectorAll("section.group")].map((section) => {
  const [, step, group] = section.id.match(/^step-(\d+)-group-(\d+)$/).map(Number)
  const names = [...section.querySelectorAll("th")].map((cell) => cell.dataset.name)
  const body = section.querySelector("tbody")
  const shared = { step, group, ...Object.fromEntries(named(section)) }
  const samples = [...body.rows].map((element) => {
    const row = { ...shared, ...Object.fromEntries([...element.cells].map((cell, i) => [names[i], valueOf(cell)])) }
    return { element, row, text: Object.values(row).filter((v) => typeof v === "string").join("\n").toLowerCase() }
  })
  return { section, body, samples }
})
const columns = [...new Set(groups.flatMap(({ samples }) => samples.flatMap(({ row }) => Object.keys(row))))]

function column(name) {
  for (const each of [name, ALIASES[name]]) if (columns.includes(each)) return each
  throw new Error(`no column '${name}'; the samples have ${columns.join(", ")}.`)
}

function conditions(text) {
  const found = []
  for (CONDITION.lastIndex = 0; CONDITION.lastIndex < text.length; ) {
    const at = CONDITION.lastIndex, match = CONDITION.exec(text)
    if (!match) throw new Error(`'${text.slice(at).trim()}' is no condition; write COLUMN OP VALUE, such as score<0.5.`)
    const quoted = /^["']/.test(match[3])
    const value = quoted ? match[3].slice(1, -1).replace(/\\(.)/gs, "$1") : match[3]
    found.push({ name: column(match[1]), op: match[2].replace("==", "="), value, quoted })
  }
  return found
}

function holds(row, { name, op, value, quoted }) {
  const found = row[name] ?? null
  if (op === "~") return found !== null && String(found).toLowerCase().includes(value.toLowerCase())
  const none = !quoted && value.toLowerCase() === "null"
  if (found === null || none) return ((found === null) === none) === (op === "=") && !(op in ORDERS)
  if (typeof found === "string") {
    if (op in ORDERS) throw new Error(`'${name}' is a text; compare it with = != or ~ (contains).`)
    const logical = found === "True" || found === "False"
    return (logical ? found.toLowerCase() === value.toLowerCase() : found === value) === (op === "=")
  }
  if (Number.isNaN(Number(value))) throw new Error(`'${name}' is a number, '${value}' is not; give a number.`)
  return op in ORDERS ? ORDERS[op](found, Number(value)) : (found === Number(value)) === (op === "=")
}

function compare(a, b) {
  const name = sort.value, [x, y] = [a.row[name] ?? null, b.row[name] ?? null]
  if (x === null || y === null) return (x === null) - (y === null) // those without a value come last
  const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y))
  return falling.checked ? -order : order
}

function update() {
  let shown = 0, inGroups = 0
  try {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean), all = conditions(where.value)
    for (const { section, samples } of groups) {
      let here = 0
      for (const { element, row, text } of samples) {
        element.hidden = !(words.every((word) => text.includes(word)) && all.every((each) => holds(row, each)))
        here += !element.hidden
      }
      section.hidden = here === 0
      shown += here
      inGroups += here > 0
    }
    count.textContent = search.value || where.value ? `${shown} samples in ${inGroups} groups` : ""
    count.className = ""
  } catch (error) {
    count.textContent = error.message
    count.className = "note failed"
  }
}

// A group stands where its first sample would.
function arrange() {
  const sorted = (samples) => (sort.value ? [...samples].sort(compare) : samples)
  for (const { body, samples } of groups) body.append(...sorted(samples).map(({ element }) => element))
  const first = groups.map(({ section, samples }) => ({ section, row: sorted(samples.filter((s) => !s.element.hidden))[0]?.row ?? {} }))
  document.getElementById("groups").append(...sorted(first).map(({ section }) => section))
}

// The group that the address names: also if a filter hides it, or it is not on the page.
function look() {
  const name = location.hash.slice(1), found = /^step-(\d+)-group-(\d+)$/.exec(name)
  const section = found && document.getElementById(name)
  if (section?.hidden) {
    search.value = where.value = ""
    update()
    section.scrollIntoView()
  }
  missing.hidden = !found || section !== null
  if (!missing.hidden) {
    missing.textContent = "Step " + found[1] + ", group " + found[2] + " is not on this page. If it was kept, " +
      "'dataflow samples RUN step=" + found[1] + " where=\"group=" + found[2] + "\"' shows it."
  }
}

sort.append(...columns.map((name) => new Option(name.replaceAll("_", " "), name)))
for (const input of [search, where]) input.addEventListener("input", () => { update(); arrange() })
for (const input of [sort, falling]) input.addEventListener("change", arrange)
document.getElementById("groups").addEventListener("click", ({ target }) => {
  const name = target.closest("th")?.dataset.name
  if (!name) return
  falling.checked = sort.value === name && !falling.checked
  sort.value = name
  arrange()
  target.closest("section").scrollIntoView()
})
addEventListener("hashchange", look)
look()
