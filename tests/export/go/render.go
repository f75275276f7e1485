// Renders conversations as Ollama does, with Go's own text/template and nothing else.
//
// Reads a JSON list of {"template", "messages"} and prints a JSON list of {"text", "error"}. What Ollama does besides
// executing the template, as its server and template packages do it (seen in August 2026):
//   - neighbouring messages of one role become one, joined by a blank line; results of tools stay apart
//   - .Messages holds all of them, system messages included; .System holds the system messages joined by blank lines
//   - a key that is missing is a zero value; json, currentDate and yesterdayDate are known besides Go's functions
//   - nothing is cut off or added after a template that uses .Messages: it must leave the last reply open itself
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type message struct{ Role, Content, Thinking, ToolName string }
type job struct {
	Template string
	Messages []*message
}
type result struct{ Text, Error string }

func render(work job) (string, error) {
	var together []*message
	var system []string
	for _, next := range work.Messages {
		if next.Role == "system" {
			system = append(system, next.Content)
		}
		if n := len(together); n > 0 && together[n-1].Role == next.Role && next.Role != "tool" {
			together[n-1].Content += "\n\n" + next.Content
		} else {
			together = append(together, next)
		}
	}
	date := func(...string) string { return "2026-01-01" }
	known := template.FuncMap{"json": func(v any) string { b, _ := json.Marshal(v); return string(b) }, "currentDate": date, "yesterdayDate": date}
	parsed, err := template.New("").Option("missingkey=zero").Funcs(known).Parse(work.Template)
	if err != nil {
		return "", err
	}
	var text strings.Builder
	err = parsed.Execute(&text, map[string]any{"System": strings.Join(system, "\n\n"), "Messages": together, "Tools": nil, "Response": "", "Think": false, "ThinkLevel": "", "IsThinkSet": false})
	return text.String(), err
}

func main() {
	var jobs []job
	if err := json.NewDecoder(os.Stdin).Decode(&jobs); err != nil {
		panic(err)
	}
	results := []result{}
	for _, work := range jobs {
		text, err := render(work)
		if err != nil {
			results = append(results, result{text, err.Error()})
		} else {
			results = append(results, result{text, ""})
		}
	}
	json.NewEncoder(os.Stdout).Encode(results)
}
