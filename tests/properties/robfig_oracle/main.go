// Answers what CronJob's scheduling library makes of a schedule; the differential test's oracle.
//
// Reads lines of zone, expression and seconds since the epoch, separated by tabs, and writes for each the next
// activation in seconds since the epoch, "none" where the search finds none, or "error" and the reason.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/robfig/cron/v3"
)

func main() {
	in := bufio.NewScanner(os.Stdin)
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for in.Scan() {
		fmt.Fprintln(out, answer(strings.Split(in.Text(), "\t")))
	}
}

func answer(question []string) string {
	if len(question) != 3 {
		return "error want zone, expression, seconds"
	}
	zone, err := time.LoadLocation(question[0])
	if err != nil {
		return "error " + err.Error()
	}
	schedule, err := cron.ParseStandard(question[1])
	if err != nil {
		return "error " + err.Error()
	}
	after, err := strconv.ParseInt(question[2], 10, 64)
	if err != nil {
		return "error " + err.Error()
	}
	if spec, ok := schedule.(*cron.SpecSchedule); ok {
		spec.Location = zone
	}
	next := schedule.Next(time.Unix(after, 0).UTC())
	if next.IsZero() {
		return "none"
	}
	return strconv.FormatInt(next.Unix(), 10)
}
