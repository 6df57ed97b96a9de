{{/* Rules of NetworkPolicies. */}}
{{/* Argument: dict "ports" LIST, and "to" or "from" PEERS, and "protocols" LIST. */}}
{{- define "leasedjob.networkPolicy.rule" -}}
- ports:
    {{- $protocols := default (list "TCP") .protocols }}
    {{- range $port := .ports }}
    {{- range $protocols }}
    - {protocol: {{ . }}, port: {{ $port }}}
    {{- end }}
    {{- end }}
  {{- with .to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .from }}
  from:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "leasedjob.networkPolicy.dns" -}}
{{- with .Values.networkPolicy.dns -}}
{{- include "leasedjob.networkPolicy.rule" (dict "ports" .ports "to" .to "protocols" (list "UDP" "TCP")) | trim -}}
{{- end -}}
{{- end -}}

{{- define "leasedjob.networkPolicy.apiServer" -}}
{{- with .Values.networkPolicy.apiServer -}}
{{- include "leasedjob.networkPolicy.rule" (dict "ports" .ports "to" .to) | trim -}}
{{- end -}}
{{- end -}}

{{/* The database as the operator, the migration and `helm test` reach it. */}}
{{- define "leasedjob.networkPolicy.database" -}}
{{- if .Values.postgresql.embedded -}}
{{- include "leasedjob.networkPolicy.rule" (dict "ports" (list 5432) "to" (list (dict "podSelector" (dict "matchLabels" (include "leasedjob.selector" (dict "root" . "component" "postgresql") | fromYaml))))) | trim -}}
{{- else -}}
{{- with .Values.networkPolicy.database -}}
{{- include "leasedjob.networkPolicy.rule" (dict "ports" .ports "to" .to) | trim -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The same as runs' Pods reach it: from another namespace, and perhaps by an address of their own. */}}
{{- define "leasedjob.networkPolicy.runsDatabase" -}}
{{- $to := .Values.networkPolicy.database.to -}}
{{- $ports := .Values.networkPolicy.database.ports -}}
{{- if .Values.postgresql.embedded -}}
{{- $ports = list 5432 -}}
{{- $to = list (dict "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace)) "podSelector" (dict "matchLabels" (include "leasedjob.selector" (dict "root" . "component" "postgresql") | fromYaml))) -}}
{{- end -}}
{{- with .Values.sidecar.database.port -}}
{{- $ports = append $ports (int .) | uniq -}}
{{- end -}}
{{- if .Values.sidecar.database.host -}}
{{- $to = list -}}
{{- end -}}
{{- include "leasedjob.networkPolicy.rule" (dict "ports" $ports "to" $to) | trim -}}
{{- end -}}

{{/* Ports of the monitors that may be called and of the collector of traces, as a JSON list. */}}
{{- define "leasedjob.networkPolicy.outward" -}}
{{- $ports := list -}}
{{- range concat .Values.monitoring.pingHosts (.Values.tracing.otlpEndpoint | list | compact) -}}
{{- $authority := regexReplaceAll "^https?://" . "" | splitList "/" | first -}}
{{- $named := regexFind ":[0-9]+$" $authority -}}
{{- $ports = append $ports ($named | trimPrefix ":" | default (hasPrefix "http://" . | ternary 80 443) | int) -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}

{{/* A policy that is there before the hook whose Pod it is for. Argument: dict "root" $ "component" NAME "egress" RULES. */}}
{{- define "leasedjob.networkPolicy.hook" }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "leasedjob.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "leasedjob.labels" (dict "root" .root "component" .component) | nindent 4 }}
  annotations:
    helm.sh/hook: pre-install,pre-upgrade
    helm.sh/hook-weight: "-30"
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  podSelector:
    matchLabels:
      {{- include "leasedjob.selector" (dict "root" .root "component" .component) | nindent 6 }}
  policyTypes: [Ingress, Egress]
  egress:
    {{- range .egress }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}
