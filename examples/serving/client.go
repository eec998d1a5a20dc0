// Send texts to a model server: go run client.go URL TEXT [TEXT ...]
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
)

type reply struct {
	Error       string
	Predictions []struct {
		Label string
		Score float64
	}
}

func predict(url string, texts []string) (reply, error) {
	var parsed reply
	body, err := json.Marshal(map[string][]string{"instances": texts})
	if err != nil {
		return parsed, err
	}
	response, err := http.Post(url+":predict", "application/json", bytes.NewReader(body))
	if err != nil {
		return parsed, err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(response.Body)
	if err != nil {
		return parsed, err
	}
	if err := json.Unmarshal(data, &parsed); err != nil {
		return parsed, err
	}
	if parsed.Error != "" {
		return parsed, fmt.Errorf("%s: %s", response.Status, parsed.Error)
	}
	return parsed, nil
}

func main() {
	answer, err := predict(os.Args[1], os.Args[2:])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, prediction := range answer.Predictions {
		fmt.Printf("%s %.3f\n", prediction.Label, prediction.Score)
	}
}
