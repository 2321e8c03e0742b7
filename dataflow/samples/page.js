"use strict"
// A table of samples. The address #step-12-group-17, as the timeline links to, shows a group with its rows open.

const data = JSON.parse(document.getElementById("samples").textContent)
const rows = data.rows.map((values) => Object.fromEntries(data.columns.map((name, i) => [name, values[i]])))
const isText = (name) => rows.some((row) => typeof row[name] === "string")
const columns = [...data.columns.filter((name) => !isText(name)), ...data.columns.filter(isText)]
const OPERATORS = {
  "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b,
  "=": (a, b) => a === b, "!=": (a, b) => a !== b,
}
const MOST = 500 // rows that are shown at once
const [search, count, head, body] = ["search", "count", "head", "rows"].map((id) => document.getElementById(id))
const boxes = {}
let sorted = null, falling = false, open = new Set()

function element(name, text = "", kind = "") {
  const made = document.createElement(name)
  made.textContent = text
  made.className = kind
  return made
}

const titles = element("tr"), filters = element("tr")
for (const name of columns) {
  const title = element("th", name.replaceAll("_", " "))
  title.dataset.name = name
  title.addEventListener("click", () => {
    falling = sorted === name && !falling
    sorted = name
    draw()
  })
  titles.append(title)
  boxes[name] = element("input", "", isText(name) ? "text" : "")
  boxes[name].setAttribute("aria-label", `filter ${name}`)
  const cell = element("th")
  cell.append(boxes[name])
  filters.append(cell)
}
head.append(titles, filters)

function shown(value) {
  if (value === null) return "–"
  return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value)
}

// An empty box keeps all; <0.5 compares; anything else is contained, in any case.
function keeps(text, value) {
  const [, sign, wanted] = /^\s*(<=|>=|!=|<|>|=)?\s*(.*?)\s*$/s.exec(text)
  if (!sign) return String(value ?? "").toLowerCase().includes(wanted.toLowerCase())
  if (typeof value === "number" && wanted !== "") return OPERATORS[sign](value, Number(wanted))
  return value !== null ? OPERATORS[sign](String(value), wanted) : sign === "!=" ? wanted !== "" : sign === "=" && wanted === ""
}

function compare(a, b) {
  const [x, y] = [a[sorted], b[sorted]]
  if (x === null || y === null) return (x === null) - (y === null) // rows without a value come last
  const order = typeof x === "string" || typeof y === "string" ? String(x).localeCompare(String(y)) : x - y
  return falling ? -order : order
}

function whole(row) {
  const list = element("dl")
  for (const name of columns) if (isText(name) && row[name] !== null) list.append(element("dt", name), element("dd", row[name]))
  const line = element("tr", "", "whole"), cell = element("td")
  cell.colSpan = columns.length
  cell.append(list)
  line.append(cell)
  return line
}

function draw() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean)
  const conditions = columns.filter((name) => boxes[name].value.trim())
  const found = rows.filter((row) => {
    if (!conditions.every((name) => keeps(boxes[name].value, row[name]))) return false
    const text = words.length ? columns.map((name) => row[name] ?? "").join("\n").toLowerCase() : ""
    return words.every((word) => text.includes(word))
  })
  if (sorted) found.sort(compare)
  for (const title of titles.children) {
    title.ariaSort = title.dataset.name === sorted ? (falling ? "descending" : "ascending") : "none"
  }
  body.replaceChildren(...found.slice(0, MOST).flatMap((row) => {
    const line = element("tr", "", "sample")
    line.append(...columns.map((name) => element("td", shown(row[name]).slice(0, 300), isText(name) ? "text" : "")))
    line.addEventListener("click", () => {
      if (!open.delete(row)) open.add(row)
      draw()
    })
    return open.has(row) ? [line, whole(row)] : [line]
  }))
  count.textContent = `${found.length} of ${rows.length} samples` + (found.length > MOST ? `, the first ${MOST} below` : "")
}

function clear() {
  for (const box of [search, ...Object.values(boxes)]) box.value = ""
  open = new Set()
}

function look() {
  const [, step, group] = /^#step-(\d+)-group-(\d+)$/.exec(location.hash) ?? []
  if (step !== undefined && rows.length) {
    clear()
    boxes.step.value = `=${step}`
    boxes.group.value = `=${group}`
    open = new Set(rows.filter((row) => row.step === Number(step) && row.group === Number(group)))
  }
  draw()
  if (step !== undefined && !open.size) {
    count.textContent = `Step ${step}, group ${group} is not on this page. If it was kept, ` +
      `'dataflow samples RUN step=${step} where="group == ${group}"' shows it.`
  }
}

for (const box of [search, ...Object.values(boxes)]) box.addEventListener("input", draw)
search.form.addEventListener("reset", (event) => { event.preventDefault(); clear(); draw() })
addEventListener("hashchange", look)
look()
