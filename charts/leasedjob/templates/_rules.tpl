{{/* What the operator does in each namespace that it watches. */}}
{{- define "leasedjob.rules" -}}
- apiGroups: [leasedjob.io]
  resources: [leasedjobs]
  verbs: [get, list, watch]
- apiGroups: [leasedjob.io]
  resources: [leasedjobruns]
  verbs: [list, watch]
- apiGroups: [leasedjob.io]
  resources: [leasedjobs/status, leasedjobruns/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- if .Values.monitoring.pingHosts }}
# URLs of monitors.
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ .Values.monitoring.secretName | quote }}]
  verbs: [get]
{{- end }}
{{- if eq (include "leasedjob.createsSecrets" .) "true" }}
# A right to create can't be limited by name.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ .Values.sidecar.secret.name | quote }}]
  verbs: [get, patch]
{{- end }}
{{- end -}}
