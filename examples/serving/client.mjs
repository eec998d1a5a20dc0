// Send texts to a model server: node client.mjs URL TEXT [TEXT ...]
// URL: http://localhost:8501/v1/models/complaints
const [url, ...texts] = process.argv.slice(2);
const response = await fetch(`${url}:predict`, {
  method: "POST",
  body: JSON.stringify({ instances: texts }),
});
const { predictions, error } = await response.json();
if (error) {
  console.error(`${response.status}: ${error}`);
  process.exit(1);
}
for (const { label, score } of predictions) console.log(label, score.toFixed(3));
